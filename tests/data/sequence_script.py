"""A training on examples by index that notes which it saw; `test_examples.py` runs it on ranks.

    ktrainer run --replace -n 2 sequence_script.py FOLDER SLOT:STEP:WHERE ...

Each rank writes `update size rank row,row,...` for each update it computes, also one that fails.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.data import Examples
from ktrainer.distributed import current_world
from tests.faults.healing_script import Dies, die_in_updates

ROWS = 103


class Source:
    """Rows of numbers, the first of which is the row's index; counts what is read."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.read = rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> np.ndarray:
        self.read += 1
        return np.array([row, row % 7, row % 3], np.float64)


def augmented(item: np.ndarray, random: np.random.Generator) -> Any:
    """An example with noise of its own in each epoch."""
    x = np.append(item, [0.0])
    x[1:] += random.normal(size=3)
    return x, item[2:]


class Recording(keras.Sequential):
    """Writes down the rows of each update, before it computes it."""

    folder = ""

    def train_step(self, batch: Any) -> Any:
        def note(rows: np.ndarray, update: np.ndarray) -> np.bool_:
            world = current_world()
            if "KTRAINER_STABLE_RANK" in os.environ and int(update) == 0:
                return np.bool_(True)  # a rank compiles its step before it joins
            listed = ",".join(str(int(row)) for row in rows)
            with open(Path(self.folder, f"{os.getpid()}.txt"), "a", encoding="utf-8") as file:
                file.write(f"{int(update)} {world.size} {world.rank} {listed}\n")
            return np.bool_(True)

        x = batch[0]
        done = tf.numpy_function(note, [x[:, 0], self.optimizer.iterations.value], tf.bool)
        with tf.control_dependencies([done]):
            batch = tf.nest.map_structure(tf.identity, batch)
        return super().train_step(batch)


def build(folder: str) -> keras.Model:
    # A global seed would make the order that of Model.fit, the same in every epoch.
    first = keras.initializers.GlorotUniform(seed=3)
    model = Recording([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=first)])
    model.folder = folder
    model.compile(keras.optimizers.SGD(1e-5), "mse")
    return model


def train(folder: str, *words: str, callbacks: list[Any] | None = None) -> list[np.ndarray]:
    """The weights after the updates that `words` allow, of those of three epochs; rows of every
    update are in files in `folder`."""
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    Path(folder).mkdir(exist_ok=True, parents=True)
    settings = ["data.batch_size=10", "trainer.epochs=3", "logging.progress=none"]
    settings += ["health.verify=off", *words]  # which trains on a few rows, and takes it back
    with Trainer(overrides=settings, callbacks=callbacks or []) as trainer:
        trainer.fit(lambda: build(folder), Examples(Source(), augmented, random=True))
        return [np.asarray(v.numpy()) for v in trainer.model.weights]


def sequence(*folders: str | Path) -> list[list[int]]:
    """The rows of each update, of the files of all ranks.

    Where it was computed twice, both must have had the same.
    """
    seen: dict[int, dict[int, dict[int, list[int]]]] = {}
    for path in (path for folder in folders for path in Path(folder).glob("*.txt")):
        for line in path.read_text().splitlines():
            update, size, rank, rows = line.split(" ")
            listed = [int(row) for row in rows.split(",")]
            old = seen.setdefault(int(update), {}).setdefault(int(size), {})
            assert old.setdefault(int(rank), listed) == listed
    updates = []
    for update in sorted(seen):
        whole = [ranks for size, ranks in seen[update].items() if len(ranks) == size]
        # A rank without rows has one of the others' as padding.
        found = [list(dict.fromkeys(r for rank in sorted(of) for r in of[rank])) for of in whole]
        assert found
        assert all(other == found[0] for other in found)
        updates.append(found[0])
    assert sorted(seen) == list(range(len(updates)))
    return updates


def digest(updates: list[list[int]]) -> str:
    return hashlib.sha256(repr(updates).encode()).hexdigest()


if __name__ == "__main__":
    folder, *faults = sys.argv[1:]
    parts = [fault.split(":") for fault in faults]
    dies = [Dies(int(slot), int(step), where) for slot, step, where in parts]
    words = ["backend=data_parallel", f"run.dir={folder}/run", *os.environ["WORDS"].split()]
    put_back = die_in_updates(dies)
    weights = train(folder, *words, callbacks=dies)
    put_back()
    if current_world().is_root:
        np.savez(Path(folder, "weights.npz"), *weights)
    current_world().barrier("results")
