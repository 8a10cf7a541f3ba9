"""Ranks die, stop and join, and the numbers stay those of one process (rows 9 and 10)."""

from __future__ import annotations

import csv
import functools
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer.checkpoint import verify
from ktrainer.runs.run_differences import compare
from ktrainer.runs.run_record import RunRecord
from tests.dist.harness.group import ROOT
from tests.faults import agreements_script, healing_script
from tests.faults.healing_script import REFUSED
from tests.processes import Done, run, warm_python

SCRIPT = Path(healing_script.__file__)
# Each rank on a host of its own, so that it measures its links; it notes its sizes of buckets.
JOINS = """
import os, sys
from ktrainer import Trainer  # the script trains by itself
from tests.faults import healing_script
from ktrainer.distributed import host_groups
from ktrainer.distributed.mpi_gradients import MpiGradients

name = os.environ.get("KTRAINER_STABLE_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
host_groups.host_name = lambda: name
original = MpiGradients._choose_sizes

def choose(self):
    sizes = original(self)
    with open(sys.argv[1] + "/sizes", "a") as file:
        file.write(f"{name} {sizes.first!r} {sizes.other!r}\\n")
    return sizes

MpiGradients._choose_sizes = choose
healing_script.main()
"""


def launch(tmp_path: Path, *words: str, settings: str = "", warm: bool = True, **env: str) -> Done:
    """Launch a script; ranks need not import TensorFlow, if the script does."""
    head = (warm_python() if warm else sys.executable, "-m", "ktrainer.cli.main", "launch")
    words = ("--all-ranks", "--timeout", "240", *words)
    env |= {"WORDS": settings, "KERAS_BACKEND": "tensorflow"}
    return run([*head, *words], seconds=270, **env)


@pytest.mark.exhaustive
def test_ranks_agree_while_another_thread_exchanges_messages(tmp_path: Path) -> None:
    """MPI's agreements alone do not bear that: one in some thousand says that a rank is lost."""
    ended = launch(tmp_path, "--heal", "-n", "4", agreements_script.__file__, warm=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("all agreed") == 4


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`one_process(name)`: that training, undisturbed, and its folder; it runs once."""

    @functools.cache
    def train(name: str) -> dict[str, Any]:
        keras.config.set_floatx("float64")  # until the test ends
        folder = tmp_path_factory.mktemp(name)
        return healing_script.train(name, [f"run.dir={folder}"], [])[0] | {"folder": folder}

    return train


def result(tmp_path: Path, number: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    facts = json.loads((tmp_path / f"{number}.json").read_text())
    with np.load(tmp_path / f"{number}.npz") as arrays:
        return facts, [arrays[name] for name in arrays.files]


def same_weights(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-10, atol=1e-12)


def same_logs(found: dict[str, Any], expected: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert len(found[name]) == len(values)
        if name not in but:
            np.testing.assert_allclose(found[name], values, rtol=1e-9, err_msg=name)


RAISES = """
import os, signal
import keras, numpy as np
from ktrainer import Callback, Trainer

class Raises(Callback):
    def on_step_end(self, step, logs=None):
        if self.world.stable_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_heal(self, progress):
        if self.world.rank == 0:
            raise ValueError("of on_heal")

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Raises()])
trainer.fit(build, (np.ones((8, 2), "float32"), np.ones((8, 1), "float32")))
"""


def test_an_error_while_healing_ends_the_run(tmp_path: Path) -> None:
    """It is not another loss, which they would heal again and again; here rank 0 alone has it."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    words = ("backend=data_parallel", "data.batch_size=4", "run.dir=null")
    ended = launch(tmp_path, "--heal", "-n", "3", str(script), *words)
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: of on_heal" in ended.stderr


# The run folder and that of checkpoints are held until its child ends.
LEAVES_A_CHILD = """
import os, signal, subprocess
from pathlib import Path
import keras, numpy as np
from ktrainer import Callback, Trainer

class Dies(Callback):
    def on_step_end(self, step, logs=None):
        if self.world.stable_rank == 0:
            files = Path("/proc/self/fd").iterdir()
            held = [int(f.name) for f in files if os.path.realpath(f).endswith("/.lock")]
            assert len(held) == 2
            subprocess.Popen(["sleep", "1.5"], pass_fds=held, stdout=-3, stderr=-3)
            os.kill(os.getpid(), signal.SIGKILL)

def build():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Dies()])
trainer.fit(build, (np.ones((8, 2), "float32"), np.ones((8, 1), "float32")))
"""


def test_folders_that_a_lost_rank_still_holds_are_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES_A_CHILD)
    words = ["backend=data_parallel", "data.batch_size=4", "checkpoint.every=1ep"]
    words += [f"run.dir={tmp_path / 'run'}", "logging.progress=none"]
    ended = launch(tmp_path, "--heal", "-n", "2", str(script), *words)
    assert ended.returncode == 0, ended.stderr
    assert "rank 0 was lost; 1 rank continues" in ended.stderr


# Nothing is learned, so that a row's loss is its y squared, in every epoch.
COUNTS = """
import json, os, signal, sys, time
from pathlib import Path
import keras, numpy as np
from ktrainer import Callback, PeerLost, Trainer
from ktrainer.elastic import ElasticRecovery
from ktrainer.state.progress import Phase

commit = ElasticRecovery.commit
done = {rank: Path(__file__).with_name(f"done-{rank}") for rank in (0, 2)}

def miss(self, phase, *args, **kwargs):
    if (phase, self.state.progress.step) != (Phase.UPDATED, 5):
        return commit(self, phase, *args, **kwargs)
    ElasticRecovery.commit = commit
    if (rank := self.world.stable_rank) != 1:
        commit(self, phase, *args, **kwargs)
        done[rank].touch()
        return
    end = time.monotonic() + 30
    while not all(path.exists() for path in done.values()):
        assert time.monotonic() < end, "the others have not done this update"
        time.sleep(0.01)
    self.world.revoke()
    raise PeerLost("as if the last message of this update had not come")

ElasticRecovery.commit = miss

def updated(step, rank):
    return Path(__file__).with_name(f"updated-{step}-{rank}")

class Dies(Callback):
    def on_step_end(self, step, logs=None):
        rank = self.world.stable_rank
        if step in (9, 15):
            updated(step, rank).touch()
        if (step, rank) in ((9, 2), (15, 1)):
            end = time.monotonic() + 30
            while not all(updated(step, m.stable_rank).exists() for m in self.world.members):
                assert time.monotonic() < end, "the others have not done this update"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

class Calls(keras.metrics.Metric):
    state_adds_up = False

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)

    def result(self):
        return self.count

def build():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Calls()])
    return model

x, y = np.ones((24, 1), "float32"), np.arange(24, dtype="float32")[:, None]
trainer = Trainer.from_cli(callbacks=[Dies()])
history = trainer.fit(build, (x, y), validation_data=(x[:6], y[:6] + 100)).history
if trainer.world.rank == 0:
    print(json.dumps(history))
"""


def test_metrics_lack_one_update_of_a_lost_rank(tmp_path: Path) -> None:
    """The epoch before, and a validation, are no part of this one. Only a metric whose states do
    not add up lacks more."""
    script = tmp_path / "counts.py"
    script.write_text(COUNTS)
    words = ("--no-prefix", "-n", "3", str(script))
    settings = "backend=data_parallel data.batch_size=6 data.shuffle=false trainer.epochs=4"
    quiet = "logging.progress=none run.dir=null"
    ended = launch(tmp_path, "--heal", *words, *settings.split(), *quiet.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Missed by rank 1; rank 2 is lost in an epoch's first update; rank 1 in one's third.
    missing: list[list[int]] = [[], [2, 3], [4, 5], [15, 16, 17]]
    expected = [np.mean(np.delete(np.arange(24.0), rows) ** 2) for rows in missing]
    history = json.loads(ended.stdout)
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(history["val_loss"], np.mean(np.arange(100, 106.0) ** 2), rtol=1e-6)
    # Means over the surviving ranks: in the second epoch rank 1 has 3 calls, with 6 of 22 rows.
    np.testing.assert_allclose(history["calls"], [4.0, (6 * 3 + 16 * 4) / 22, 4.0, 4.0], rtol=1e-6)
    assert ended.stderr.count("may lack their part of one update, and calls all of their part") == 2
    assert "no rank was lost; 3 ranks continue after step 5" in ended.stderr
    assert "may lack a rank's part of one update\n" in ended.stderr


@pytest.mark.quick
@pytest.mark.parametrize("settings", ["", "trainer.xla=true"])
def test_weights_do_not_decay_in_an_interrupted_update(
    tmp_path: Path, one_process: Any, settings: str
) -> None:
    """Decay needs no gradient, so TensorFlow could run it before the all-reduce that fails."""
    words = ("--heal", "-n", "3", str(SCRIPT), str(tmp_path), "falling,2:4:in")
    ended = launch(tmp_path, *words, settings=settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts, weights = result(tmp_path, 0)
    assert facts["healed"][0][:3] == [4, [2], 2]
    same_weights(weights, one_process("falling")["weights"])


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_ranks_lost_at_four_three_and_two_ranks(tmp_path, one_process) -> None:
    """Ranks in an all-reduce, one that stops, and one between an update and its end."""
    faults = ["falling,4:8:in", "mixed,0:7:in,1:9:before!", "words,2:9:after"]
    ended = launch(
        tmp_path,
        *("--heal", "-n", "5", str(SCRIPT), str(tmp_path), *faults),
        settings="world.deadline=8",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NBC_" not in ended.stderr
    trainings = [("falling", [4], [4]), ("mixed", [0, 0], [3, 2]), ("words", [0], [1])]
    for number, (name, ranks, sizes) in enumerate(trainings):
        facts, weights = result(tmp_path, number)
        healed = [(gone, left) for _, gone, left, _ in facts["healed"]]
        assert healed == [([rank], size) for rank, size in zip(ranks, sizes, strict=True)]
        # Measured: 0.02 to 0.1; the machine may be busy.
        assert all(seconds < 5.0 for *_, seconds in facts["healed"])
        expected = one_process(name)
        same_weights(weights, expected["weights"])
        # What a rank had counted in the update in which it was lost is not known.
        uncertain = () if name == "mixed" else ("loss", "accuracy")
        same_logs(facts["history"], expected["history"], but=uncertain)
    assert "rank 0 was lost; 3 ranks continue after step 7" in ended.stderr
    run = tmp_path / "run-1"
    saved = sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())
    assert saved == ["step-00000014", "step-00000016"]  # nothing half-written is left
    assert not any(verify(run / "checkpoints" / name) for name in saved)
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["event"] == "epoch"]
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4]


@pytest.mark.timeout(300)
def test_joining_ranks_replace_lost_ranks(tmp_path, one_process) -> None:
    """One dies in validation, another comes; then the first rank dies, and its duties pass on."""
    script = tmp_path / "joins.py"
    script.write_text(JOINS)
    faults = "longer,1:8:validation,0:16:joined"
    words = ("--replace", "-n", "2", str(script), str(tmp_path), faults)
    ended = launch(tmp_path, *words, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = one_process("longer")
    facts, weights = result(tmp_path, 0)
    same_weights(weights, expected["weights"])
    same_logs(facts["history"], expected["history"])
    assert expected["skipped"] > 20  # as spikes
    assert facts["stable_rank"] > 1  # a rank that joined is the first at the end
    assert not facts["listens everywhere"]  # row 27: neither does any of those who are left
    assert "a rank joined; 2 ranks continue" in ended.stderr
    assert "rank 0 was lost; 1 rank continues" in ended.stderr
    whole, healed = RunRecord(expected["folder"]), RunRecord(tmp_path / "run-0")
    found = compare(whole, healed, tolerance=1e-9)
    assert (found.first, found.alone) == ({}, (0, 0))
    assert found.points >= len(expected["history"]["loss"])
    changes = [event["lost"] for event in healed.events if event["event"] == "ranks"]
    # Where steps are slow, another rank joins the last one before the end.
    late = ended.stderr.count("a rank joined; 2 ranks continue") - 1
    assert changes == [[1], [], [0]] + [[]] * late
    assert (healed.state, len(healed.starts)) == (("finished", ""), 1)
    sizes = [line.split() for line in (tmp_path / "sizes").read_text().splitlines()]
    assert {name for name, *_ in sizes} >= {"0", "1", "2"}
    assert len({(first, other) for _, first, other in sizes}) == 1  # whatever a rank measured
    assert sizes[0][1] == "1.0"


@pytest.mark.exhaustive
def test_keras_writes_the_row_of_an_epoch_once(tmp_path: Path) -> None:
    """Its end comes again where a rank was lost in it."""
    words = ("--heal", "-n", "2", str(SCRIPT), str(tmp_path), "falling,1:8:epoch")
    ended = launch(tmp_path, *words)
    assert "1 rank continues after step 8" in ended.stderr
    lines = (tmp_path / "run-0" / "keras.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]


@pytest.mark.exhaustive
def test_a_rank_with_other_data_cannot_join(tmp_path: Path) -> None:
    """Its gradients would be of other examples, with weights that are equal on all ranks."""
    words = ("--replace", "-n", "2", str(SCRIPT), str(tmp_path), "falling,1:5:after,0:99:joined")
    ended = launch(tmp_path, *words, settings="trainer.epochs=10", CHANGES="1")
    assert ended.returncode == 0, ended.stderr
    refused = ended.stderr.count("this process cannot join: data training/x is ")
    assert 1 <= refused <= REFUSED  # as many as there was time for
    no_more = "3 processes that were to join have failed: no more are started"
    assert (no_more in ended.stderr) == (refused == REFUSED)
    facts, _ = result(tmp_path, 0)
    assert facts["healed"][0][:3] == [5, [1], 1]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_rank_that_never_joins_is_not_waited_for(tmp_path, one_process) -> None:
    words = ("--replace", "-n", "2", str(SCRIPT), str(tmp_path), "mixed,1:5:before")
    ended = launch(tmp_path, *words, NEVER_JOINS="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts, weights = result(tmp_path, 0)
    assert [change[1] for change in facts["healed"]] == [[1]]
    same_weights(weights, one_process("mixed")["weights"])


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_too_few_are_left(tmp_path, one_process) -> None:
    """The surviving ranks save and end; one process resumes from there."""
    ended = launch(
        tmp_path,
        *("--min-n", "2", "-n", "2", str(SCRIPT), str(tmp_path), "mixed,0:11:before"),
    )
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "surviving ranks after step 11: 1, fewer than world.min_size=2" in last
    run = tmp_path / "run-0"
    assert str(run / "checkpoints") in last
    assert (run / "checkpoints" / "step-00000011").is_dir()
    keras.config.set_floatx("float64")
    rest = healing_script.train("mixed", [f"run.dir={run}"], [])[0]
    expected = one_process("mixed")
    same_weights(rest["weights"], expected["weights"])
    same_logs(rest["history"], expected["history"])
