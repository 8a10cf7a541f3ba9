"""Scripts that have never heard of ktrainer, under `ktrainer run`: the numbers of plain Keras."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests import processes
from tests.dist.small import more
from tests.processes import Done, ktrainer, python

SCRIPTS = Path(__file__).parent / "scripts"
ONE: list[str] = []
LOCAL = ["backend=local"]
TWO = ["backend=data_parallel"]
STAGES = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=2"]
MIRRORED = ["backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=[CPU:0,CPU:1]"]
WAYS = {"local": (1, LOCAL), "ranks": (2, TWO), "stages": (2, STAGES), "mirrored": (1, MIRRORED)}


def start(folder: Path, *command: object, **env: str) -> Done:
    return python(*command, cwd=folder, TF_CPP_MIN_LOG_LEVEL="3", **env)


def run(folder: Path, *words: object, **env: str) -> Done:
    return ktrainer("run", "--no-prefix", *words, cwd=folder, **env)


def run_importing(folder: Path, *words: object) -> Done:
    """The same of a script for which it matters when Keras is imported."""
    return start(folder, "-m", "ktrainer.cli.main", "run", "--no-prefix", *words)


def result(done: Done) -> dict[str, Any]:
    """What a script printed, once."""
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr
    assert len(found) == 1, done.stdout
    record: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return record


@functools.cache
def plain(script: str) -> dict[str, Any]:
    """The result of `python script`."""
    with tempfile.TemporaryDirectory() as folder:
        return result(processes.script(SCRIPTS / script, cwd=Path(folder)))


def assert_same(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert record.keys() == expected.keys()
    for name, value in expected.items():
        keras.tree.assert_same_structure(record[name], value)
        pairs = zip(keras.tree.flatten(record[name]), keras.tree.flatten(value), strict=True)
        for mine, theirs in pairs:
            if isinstance(theirs, str):
                assert mine == theirs
            else:
                np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.quick
@pytest.mark.parametrize("way", ["ranks", "stages"])
def test_training_saving_and_single_batches(way: str, tmp_path: Path) -> None:
    ranks, words = WAYS[way]
    done = run(tmp_path, "-n", ranks, SCRIPTS / "classify.py", *words, "--", "--epochs=2")
    assert_same(result(done), plain("classify.py"))
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"best.keras", "log.csv", "model.keras", "model.weights.h5", "runs"}
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert "every rank writes" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["local", "ranks", "mirrored"])
def test_models_in_turn_in_a_strategy_of_the_script(way: str, tmp_path: Path) -> None:
    ranks, words = WAYS[way]
    done = run(tmp_path, "-n", ranks, SCRIPTS / "gan.py", *words)
    assert_same(result(done), plain("gan.py"))
    said = done.stderr.count("MirroredStrategy has no effect")
    assert said == (0 if way == "mirrored" else 1)
    assert done.stderr.count("every rank writes") == (ranks > 1)
    assert ("record.txt" in done.stderr) == (ranks > 1)
    assert "fake.png" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ranks", "mirrored"])
def test_kinds_of_models_data_and_callbacks(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain("shapes.py")
    ranks, words = WAYS[way]
    if way == "ranks":
        monkeypatch.setenv("ASKED", "jax")
        done = run_importing(tmp_path, "-n", ranks, SCRIPTS / "shapes.py", *words)
        assert "the script asks for Keras on jax" in done.stderr
    else:
        done = run(tmp_path, "-n", ranks, SCRIPTS / "shapes.py", *words)
    assert_same(result(done), expected)
    assert "every rank writes" not in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize("way", ["local", "stages"])
def test_batches_that_are_not_lists_of_examples(way: str, tmp_path: Path) -> None:
    """One replica trains on all of their arrays, however long each is."""
    ranks, words = WAYS[way]
    one = ["backend.microbatches=1"] if way == "stages" else []
    done = run(tmp_path, "-n", ranks, SCRIPTS / "graphs.py", *words, *one)
    assert_same(result(done), plain("graphs.py"))


@pytest.mark.exhaustive
def test_a_trainer_of_another_module_ends_the_routing(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import keras\nfrom ktrainer import Trainer\n"
        "trainer = Trainer.from_cli(defaults={'trainer': {'epochs': 2}})\n"
    )
    (tmp_path / "script.py").write_text(
        "import keras\nrouted = keras.Model.fit\nimport numpy as np\nimport beside\n"
        "from ktrainer import barrier\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "history = beside.trainer.fit(model, np.ones((8, 2)), np.ones((8, 1)))\n"
        "barrier()\n"
        "print(len(history.epoch), keras.Model.fit is routed, beside.trainer.world.size)\n"
    )
    done = run(tmp_path, "-n", 2, "script.py", *TWO, "logging.progress=none", "seed=4")
    assert done.stdout == "2 False 2\n", done.stderr
    text = (tmp_path / "beside.py").read_text()
    (tmp_path / "beside.py").write_text(text.replace(".from_cli(defaults=", "("))
    refused = run(tmp_path, "script.py", "trainer.epochs=5")
    assert "trainer.epochs has no effect: the script makes its Trainer" in refused.stderr
    assert refused.stdout == ""
    own = text.replace("(defaults=", "(argv=['trainer.epochs=2'], defaults=")
    (tmp_path / "beside.py").write_text(own)
    done = run(tmp_path, "script.py", "trainer.epochs=5", "logging.progress=none")
    assert done.stdout == "2 False 1\n", done.stderr


@pytest.mark.exhaustive
def test_command_line_wins_over_arguments(tmp_path: Path) -> None:
    record = result(run(tmp_path, SCRIPTS / "classify.py", "trainer.epochs=1", "--epochs", 3))
    expected = plain("classify.py")
    assert len(record["history"]["loss"]) == 1
    assert record["history"]["loss"] == pytest.approx(expected["history"]["loss"][:1], rel=1e-12)


SEEDED = """
import random
import numpy as np
random.seed(1); np.random.seed(1)
import keras
from tensorflow.python.eager import context
drawn, seed = [random.random(), np.random.rand()], context.global_seed()
keras.utils.set_random_seed(1)
x = np.arange(12.0)[:, None]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
seen = []
class See(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        seen.append(logs["loss"])
model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[See()])
print("RESULT", __import__("json").dumps({"drawn": drawn, "seen": seen}))
print("SEED", seed)
"""


@pytest.mark.exhaustive
def test_a_script_keeps_its_own_seeds_and_its_lack_of_them(tmp_path: Path) -> None:
    (tmp_path / "seeded.py").write_text(SEEDED)
    expected = result(start(tmp_path, "seeded.py"))
    # The import of Keras, which comes after the script's seeds, draws numbers itself.
    alone = run_importing(tmp_path, "seeded.py")
    several = run_importing(tmp_path, "-n", 2, "seeded.py", *TWO, "seed=5")
    for done in (alone, several):
        record = result(done)
        assert record["drawn"] == expected["drawn"]
        np.testing.assert_allclose(record["seen"], expected["seen"], rtol=1e-5)
    assert "SEED None" in alone.stdout
    assert "SEED 5" in several.stdout


FAILING = """
import keras
caught = []
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
for save in (
    lambda: model.save("none/there/model.txt"),
    lambda: keras.utils.get_file("x", origin="file:///not/there", cache_dir="cache"),
):
    try:
        save()
    except Exception as error:
        caught.append(f"{type(error).__name__} {error}"[:40])
print(caught)
"""


@pytest.mark.exhaustive
def test_what_rank_0_fails_in_fails_alike_on_all(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    done = run(tmp_path, "-n", 2, "--all-ranks", "failing.py", *TWO)
    # A message of a download of rank 0 may come in between.
    lines = [line for line in done.stdout.splitlines() if line.startswith("['")]
    assert len(lines) == 2, done.stdout
    assert lines[0] == lines[1]
    assert lines[0].startswith("['ValueError ")
    assert lines[0].count("', '") == 1


ON_RANK_0 = """
import keras
import numpy as np
from ktrainer import rank_zero_only
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rank_zero_only(model.fit)(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
import ktrainer
ktrainer.barrier()
"""


@pytest.mark.exhaustive
def test_fit_on_rank_0_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(ON_RANK_0)
    done = run(tmp_path, "-n", 2, "alone.py", *TWO)
    assert done.returncode == 1
    assert "fit was called on rank 0 alone, inside @ktrainer.rank_zero_only" in done.stderr


@pytest.mark.exhaustive
def test_fit_of_keras_beside_a_trainer_that_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "unmade.py").write_text(
        "import keras\nimport numpy as np\nfrom ktrainer import Trainer\n"
        "model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "for _ in range(2): model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)\n"
    )
    done = run(tmp_path, "-n", 2, "unmade.py")
    assert done.returncode == 0
    assert done.stderr.count("each of 2 ranks trains by itself") == 1


@pytest.mark.exhaustive
def test_loop_of_its_own_is_refused_by_several_and_runs_in_one(tmp_path: Path) -> None:
    refused = run(tmp_path, "-n", 2, SCRIPTS / "loop.py", *TWO)
    assert refused.returncode == 1
    assert "loop.py, line 14, in train_step" in refused.stderr
    assert "(backend=data_parallel). Put the step into `train_step`" in refused.stderr
    assert "ModelError: this script applies gradients in its own loop (" in refused.stderr
    assert "in user code" not in refused.stderr
    assert "before" not in refused.stdout
    assert run(tmp_path, SCRIPTS / "loop.py").stdout == "before True\n"


@pytest.mark.exhaustive
def test_models_that_share_layers_are_used_in_callbacks_of_fit(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", 2, SCRIPTS / "sharing.py", *STAGES, "health.audit_every=null")
    assert_same(result(done), plain("sharing.py"))


COMPILED_INSIDE = """
import keras, numpy as np
inputs = keras.Input((2,))
hidden = keras.layers.Dense(4)(inputs)
whole = keras.Model(inputs, keras.layers.Dense(2)(hidden))
part = keras.Model(inputs, hidden)
for model in (whole, part):
    model.compile("sgd", "mse")
x = np.ones((8, 2))
class TrainPart(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        part.fit(x, np.ones((8, 4)), verbose=0)
whole.fit(x, x, verbose=0, callbacks=[TrainPart()])
"""


@pytest.mark.exhaustive
def test_training_shared_layers_inside_of_fit_in_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inside.py").write_text(COMPILED_INSIDE)
    done = run(tmp_path, "-n", 2, "inside.py", *STAGES)
    assert done.returncode == 1
    assert "trains a model that shares layers with it. Do that after `fit`" in done.stderr


@pytest.mark.exhaustive
def test_ranks_decide_alike_on_batches_and_rank_0_alone_may_save(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", 2, SCRIPTS / "byrank.py", *TWO)
    assert_same(result(done), plain("byrank.py"))


@pytest.mark.exhaustive
def test_a_checkpoint_that_a_stage_lacks_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", 2, SCRIPTS / "byrank.py", *STAGES)
    assert done.returncode == 1
    assert "ModelCheckpoint is not among the callbacks of every rank" in done.stderr


UNSEEDED = """
import sys
import keras, numpy as np
import torch
seeded = torch.seeded
del sys.modules["torch"]
firsts = []
class See(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            firsts.append(float(logs["loss"]))
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.0), "mse")
x = np.arange(64.0)[:, None]
model.fit(x, x, epochs=3, batch_size=8, verbose=0, callbacks=[See()])
print(len(set(firsts)), len(seeded))
"""


@pytest.mark.exhaustive
def test_orders_of_epochs_differ_and_torch_is_seeded_where_ranks_draw_a_seed(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("seeded = []\nmanual_seed = seeded.append\n")
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    done = run(tmp_path, "-n", 2, "unseeded.py", *TWO, "logging.progress=none")
    assert done.stdout == "3 1\n", done.stderr


SPLIT = """
import keras, numpy as np
print(np.random.permutation(1000)[:5], np.random.default_rng().integers(1000))
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 1)), np.ones((8, 1)), verbose=0)
"""


def test_a_resume_splits_data_as_before_if_ranks_drew_the_seed(tmp_path: Path) -> None:
    (tmp_path / "split.py").write_text(SPLIT)
    words = ["split.py", *TWO, "logging.progress=none", "run.dir=runs/a", "checkpoint.every=1ep"]
    first = run(tmp_path, "-n", 2, *words)
    assert first.stdout.count("[") == 1, first.stderr
    assert run(tmp_path, "-n", 2, *words, "trainer.epochs=2").stdout == first.stdout
    assert run(tmp_path, "-n", 2, *words, "checkpoint.resume=never").stdout != first.stdout


CTRL_C = """
import os, signal
import keras, numpy as np
class Asks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
fit = lambda: model.fit(np.ones((8, 1)), np.ones((8, 1)), epochs=9, verbose=0, callbacks=[Asks()])
try:
    fit()
except KeyboardInterrupt:
    model.save("kept.keras")
    print("saved at", int(model.optimizer.iterations.numpy()), flush=True)
try:
    fit()
except KeyboardInterrupt:
    raise SystemExit(1)  # as libraries of command lines do
"""


def test_a_script_that_catches_ctrl_c_saves_its_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CTRL_C)
    done = run(tmp_path, "-n", 2, "script.py", *TWO, "logging.progress=none")
    assert done.stdout == "saved at 1\n", done.stderr
    assert (tmp_path / "kept.keras").exists()
    assert done.returncode == 130  # of the second `fit`, after which nothing is done
    assert "interrupted by SIGINT at step 1, and there is no checkpoint" in done.stderr


SLOW = """
import time
import keras
class Slow(keras.layers.Dense):
    def save_own_variables(self, store):
        time.sleep(10)
        super().save_own_variables(store)
model = keras.Sequential([keras.Input((4,)), Slow(1)])
model.save("slow.keras")
print("saved")
"""


@pytest.mark.exhaustive
def test_saving_may_last_longer_than_other_waits(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    done = run(tmp_path, "-n", 2, "slow.py", *TWO, "world.deadline=6", "logging.progress=none")
    assert done.stdout == "saved\n", done.stderr


@pytest.mark.parametrize(
    "line", ["from ktrainer.data import Examples", more("from ktrainer import Callback")]
)
def test_what_a_script_imports_before_keras(line: str, tmp_path: Path) -> None:
    whole = "import sys\nassert not sys.modules['ktrainer.data'].__spec__._initializing\n"
    said = "print('RESULT', '{}')\n"
    (tmp_path / "script.py").write_text(f"{line}\n{whole}import keras\n{said}")
    assert result(run_importing(tmp_path, "script.py", "trainer.epochs=1")) == {}


def test_a_module_of_the_script_that_makes_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("from ktrainer import Trainer\nimport keras\n")
    said = "print('RESULT', json.dumps(helper.Trainer.__name__))\n"
    (tmp_path / "script.py").write_text(f"import helper, json\n{said}")
    assert result(run_importing(tmp_path, "script.py")) == "Trainer"


def test_a_script_that_looks_for_keras_before_it_imports_it(tmp_path: Path) -> None:
    """As libraries do that work with several frameworks."""
    (tmp_path / "script.py").write_text(
        "from importlib.util import find_spec\n"
        "assert find_spec('keras') and find_spec('tensorflow')\n"
        "import json, sys, keras\n"
        "print('RESULT', json.dumps('ktrainer.script.routing' in sys.modules))\n"
    )
    assert result(run_importing(tmp_path, "script.py")) is True


def test_keras_2_is_refused_where_each_rank_would_train_by_itself(tmp_path: Path) -> None:
    (tmp_path / "tf_keras.py").write_text("class Model:\n    def fit(self): print('trained')\n")
    with (tmp_path / "tf_keras.py").open("a") as file:
        file.write("    train_on_batch = fit\n")
    (tmp_path / "script.py").write_text("import tf_keras\ntf_keras.Model().fit()\n")
    several = run(tmp_path, "-n", 2, "script.py", *TWO)
    assert (several.returncode, several.stdout) == (1, ""), several.stderr
    assert "SetupError: tf_keras is Keras 2" in several.stderr
    assert run(tmp_path, "script.py").stdout == "trained\n"


def test_a_script_has_one_run_in_wandb(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("def init(project, mode=None): print(project, mode)\n")
    (tmp_path / "script.py").write_text("import wandb\nwandb.init('digits')\nimport keras\n")
    done = run(tmp_path, "-n", 2, "--all-ranks", "script.py", *TWO, "logging.progress=none")
    assert sorted(done.stdout.splitlines()) == ["digits None", "digits disabled"], done.stderr


DEVICES = """
import json
import keras, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")
for set in (tf.config.set_visible_devices, tf.config.experimental.set_visible_devices):
    set(cpu, "CPU")
parts = [tf.config.LogicalDeviceConfiguration()] * 3
tf.config.set_logical_device_configuration(cpu[0], parts)
print("RESULT", json.dumps(len(tf.config.list_logical_devices("CPU"))))
"""


@pytest.mark.parametrize(("way", "devices"), [("local", 3), ("ranks", 1), ("mirrored", 2)])
def test_devices_of_the_script_do_not_undo_those_of_ranks(
    way: str, devices: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(DEVICES)
    ranks, words = WAYS[way]
    done = run(tmp_path, "-n", ranks, "script.py", *words, "logging.progress=none")
    assert result(done) == devices
    said = done.stderr.count("set_visible_devices of the script has no effect")
    assert said == (way != "local")


WRITERS = """
import glob, json
import keras, numpy as np, tensorflow as tf
class Own(keras.callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {**logs, "mine": 1.0})
keras.config.set_floatx("float64")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.arange(16.0).reshape(16, 1)
for kind in (Own, keras.callbacks.TensorBoard):
    model.fit(x, x, 8, 2, 0, [kind(kind.__name__, update_freq=1)])
model.evaluate(x, x, verbose=0, callbacks=[keras.callbacks.TensorBoard("evaluated")])
record = {}
for folder in ("Own/train", "TensorBoard/train", "evaluated/validation"):
    files = glob.glob(folder + "/*.tfevents.*")
    values = [
        float(tf.make_ndarray(value.tensor).item())
        for path in sorted(files)
        for record_ in tf.data.TFRecordDataset(path)
        for value in tf.compat.v1.Event.FromString(record_.numpy()).summary.value
        if value.tag.endswith("loss")
    ]
    record[folder] = [float(len(files)), *values]
print("RESULT", json.dumps(record))
"""


@pytest.mark.exhaustive
def test_what_callbacks_write_is_of_all_ranks_and_written_once(tmp_path: Path) -> None:
    """Losses of batches, too; of a class of the script's own a warning says that rank 0 alone runs
    it."""
    (one := tmp_path / "one").mkdir()
    (tmp_path / "writers.py").write_text(WRITERS)
    expected = result(processes.script(tmp_path / "writers.py", cwd=one))
    assert len(expected["TensorBoard/train"]) == 1 + 4 + 2  # files, batches and epochs
    done = run(tmp_path, "-n", 2, "writers.py", *TWO)
    record = result(done)
    assert record.keys() == expected.keys()
    for folder, values in expected.items():
        np.testing.assert_allclose(record[folder], values, rtol=1e-6, err_msg=folder)
    assert done.stderr.count("Own is a TensorBoard, and so runs on rank 0 alone") == 1
