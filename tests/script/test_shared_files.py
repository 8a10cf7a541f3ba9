"""Folders and files of scripts that every rank makes: as if one process had made them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.processes import script
from tests.script.test_run import STAGES, TWO, assert_same, result, run, start

FOLDERS = """
import json, os, pathlib, shutil, time
import keras
record = []
def wait_on(rank):
    time.sleep(0.5 * (os.environ["OMPI_COMM_WORLD_RANK"] == str(rank)))
def attempt(make, folder):
    try:
        make(folder)
        record.append("done")
    except FileExistsError:
        record.append("exists")
    except FileNotFoundError:
        record.append("missing")
attempt(os.mkdir, "once")
attempt(os.mkdir, "once")
if record[-1] == "exists":
    attempt(os.makedirs, "a/b")
attempt(lambda folder: pathlib.Path(folder).mkdir(parents=True), "a/c")
attempt(os.mkdir, "before")
attempt(os.mkdir, "file.txt")
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.save("once/model.keras")  # all ranks are here
attempt(shutil.rmtree, "once")
attempt(os.remove, "file.txt")
attempt(os.remove, "file.txt")
for slow in (0, 1):
    model.save("a/model.keras")
    wait_on(slow)
    attempt(os.mkdir, "once")
    attempt(os.rmdir, "once")
print("RESULT", json.dumps({"record": record}))
"""


@pytest.mark.exhaustive
def test_folders_are_made_and_removed_once(tmp_path: Path) -> None:
    (tmp_path / "folders.py").write_text(FOLDERS)
    (tmp_path / "before").mkdir()
    (tmp_path / "file.txt").touch()
    done = run(tmp_path, "-n", 2, "--all-ranks", "folders.py", *TWO, "logging.progress=none")
    assert done.returncode == 0, done.stderr
    assert "every rank writes" not in done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    made = ["done", "exists", "done", "done", "exists", "exists"]
    expected = [*made, "done", "done", "missing", *["done"] * 4]
    assert result_of(first) == expected
    assert not (tmp_path / "once").exists()


AGAIN = """
import os
import keras
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
for _ in range(5):
    model.save("model.keras")
    os.remove("model.keras")
for _ in range(50):
    with open("scratch.txt", "w") as file:
        file.write("new")
    os.remove("scratch.txt")
print("RESULT", "{}")
"""


@pytest.mark.exhaustive
def test_a_file_may_be_written_and_removed_again(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(AGAIN)
    done = run(tmp_path, "-n", 2, "--all-ranks", "again.py", *TWO, "logging.progress=none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT") == 2


def result_of(line: str) -> object:
    return json.loads(line.removeprefix("RESULT "))["record"]


TEMPORARY = """
import csv, json, os, tempfile
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.linspace(0, 1, 24)[:, None]
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with tempfile.TemporaryDirectory() as folder:
    log = os.path.join(folder, "log.csv")
    best = os.path.join(folder, "best.weights.h5")
    callbacks = [
        keras.callbacks.CSVLogger(log),
        keras.callbacks.ModelCheckpoint(best, save_weights_only=True),
    ]
    model.fit(x, x, epochs=2, batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)
    losses = [float(row["loss"]) for row in csv.DictReader(open(log))]
    model.save(os.path.join(folder, "model.keras"))
    loaded = keras.models.load_model(os.path.join(folder, "model.keras"))
    model.export(os.path.join(folder, "exported"), verbose=False)
    tf.saved_model.save(model, os.path.join(folder, "saved"))
    exported = sorted(os.listdir(os.path.join(folder, "exported")))
    saved = tf.saved_model.load(os.path.join(folder, "saved"))
    (served,) = saved.signatures["serving_default"](tf.constant(x[:3])).values()
    loaded.load_weights(best)
print("RESULT", json.dumps({
    "losses": losses, "exported": exported, "served": served.numpy().tolist(),
    "predicted": loaded.predict(x[:3], verbose=0).tolist(),
}))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [TWO, STAGES])
def test_each_rank_finds_what_it_saved_in_a_temporary_folder(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "temporary.py").write_text(TEMPORARY)
    expected = result(script("temporary.py", cwd=tmp_path))
    assert_same(result(run(tmp_path, "-n", 2, "temporary.py", *words)), expected)


NORMALIZED = """
import json
import keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(3.0, 2.0, (24, 4))
def build():
    scale = keras.layers.Normalization()
    scale.adapt(x)
    return keras.Sequential([keras.Input((4,)), scale, keras.layers.Dense(3, "tanh"),
                             keras.layers.Dense(4)])
model = build()
model.compile("adam", "mse")
fit = dict(batch_size=8, verbose=0, shuffle=False)
first = model.fit(x, x, **fit).history
model.save_weights("first.weights.h5")
model.fit(x, x, **fit)
model.load_weights("first.weights.h5")
evaluated = model.evaluate(x, x, verbose=0)
again = model.fit(x, x, **fit).history
print("RESULT", json.dumps({"first": first, "evaluated": evaluated, "again": again}))
"""


@pytest.mark.exhaustive
def test_weights_are_loaded_into_a_model_in_stages(tmp_path: Path) -> None:
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    expected = result(script("normalized.py", cwd=tmp_path))
    assert_same(result(run(tmp_path, "-n", 2, "normalized.py", *STAGES)), expected)


INPUTS = """
import dataclasses, json, os, pathlib, sys
import keras, numpy as np, tensorflow as tf
keras.config.set_floatx("float64")
@dataclasses.dataclass
class Options:
    rate: float = 0.1
    fast: bool = False
folder = pathlib.Path(__file__).parent.parent
unpacked = keras.utils.get_file(
    origin=(folder / "words.tar.gz").as_uri(), extract=True, cache_dir=os.environ["CACHE"])
words = pathlib.Path(unpacked, "words.txt")
text, changed = words.read_text(), words.stat().st_ctime_ns
x = tf.data.Dataset.from_tensor_slices(np.arange(8.0).reshape(8, 1)).batch(4).cache("cached")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(x.map(lambda rows: (rows, 2 * rows)), epochs=3, verbose=0).history
print("RESULT", json.dumps({
    "paths": [__file__, sys.argv[0], str(folder)],
    "types": [field.type.__name__ for field in dataclasses.fields(Options)],
    "words": [len(text), words.stat().st_ctime_ns == changed],
    "loss": history["loss"]}))
"""


def test_what_a_script_reads(tmp_path: Path) -> None:
    """An archive is unpacked once, ranks cache data in files of their own; and a script sees its
    path and annotations as Python shows them."""
    (tmp_path / "words.txt").write_text("a word " * 1000)
    with tarfile.open(tmp_path / "words.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "words.txt", "words.txt")
    (source := tmp_path / "source").mkdir()
    (source / "inputs.py").write_text(INPUTS)
    plain = start(source, "inputs.py", CACHE=str(tmp_path / "one"))
    for old in source.glob("cached*"):
        old.unlink()
    done = run(source, "-n", 2, "inputs.py", *TWO, CACHE=str(tmp_path / "two"))
    assert_same(result(done), result(plain))
    assert result(done)["words"][1]
    assert {path.name.partition(".")[0] for path in source.glob("cached*")} == {
        f"cached-rank{rank}-of-2" for rank in (0, 1)
    }


OF_TENSORFLOW = """
import json, os, tempfile
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(1)])
model.compile("sgd", "mse")
checkpoint = tf.train.Checkpoint(model=model, count=tf.Variable(0))
manager = tf.train.CheckpointManager(checkpoint, "managed", max_to_keep=1)
x, saved = np.ones((8, 2)), []
class Saves(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        saved.append(manager.save())
writer = tf.summary.create_file_writer("logs")
with writer.as_default():
    model.fit(x, x[:, :1], epochs=3, verbose=0, callbacks=[Saves()])
    tf.summary.scalar("a", 1.0, step=1)
writer.close()
writes = [checkpoint.save("own/a"), checkpoint.write(file_prefix="own/b")]
before = model.predict(x, verbose=0).tolist()
here = checkpoint.save(os.path.join(tempfile.mkdtemp(), "c"))
model.set_weights([0 * w for w in model.get_weights()])
checkpoint.restore(here).assert_existing_objects_matched()
record = {"known": [*saved, *writes, manager.latest_checkpoint, *manager.checkpoints]}
record["same"] = np.allclose(before, model.predict(x, verbose=0))
record["count"] = int(checkpoint.save_counter.numpy())
print("RESULT", json.dumps(record))
"""


@pytest.mark.exhaustive
def test_what_tensorflow_writes_is_written_once(tmp_path: Path) -> None:
    (one := tmp_path / "one").mkdir()
    (tmp_path / "script.py").write_text(OF_TENSORFLOW)
    expected = result(script(tmp_path / "script.py", cwd=one))
    assert expected["same"]
    words = ["-n", 2, "--all-ranks", "script.py", *TWO, "logging.progress=none"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert [json.loads(line.removeprefix("RESULT ")) for line in lines] == [expected] * 2
    for folder in ("managed", "own"):
        assert len(list((tmp_path / folder).iterdir())) == len(list((one / folder).iterdir()))
    assert len(list((tmp_path / "logs").iterdir())) == 1
