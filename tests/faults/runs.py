"""Runs of eight updates that save after each one, and resume from any of them.

A run that is killed after update k has just the checkpoint of k in its folder, or one before.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.data.experimental.ops.testing import sleep

from ktrainer import Trainer, distributed
from ktrainer.steps.named_variables import model_variables
from tests.small import data as arrays

STEPS = 8
BATCH = 4

_seen: list[str] = []  # digests of the batches that `Recording` was trained on


class Result(NamedTuple):
    """What must be equal to the bit, whether a run was interrupted or not."""

    history: dict[str, list[float]]
    variables: dict[str, bytes]
    step: int


@dataclass(frozen=True)
class Case:
    """A kind of run.

    Attributes:
        model: makes the compiled model.
        rows: of data; with `words`, such that there are eight updates.
        words: settings, over those that all have.
        callbacks: makes the callbacks.
        data: makes the data of `rows`.
    """

    model: Callable[[], Any]
    rows: int
    words: tuple[str, ...]
    callbacks: Callable[[], list[Any]] = list
    data: Callable[[int], Any] | None = None


def settings(folder: Path, case: Case, *more: str) -> list[str]:
    return [
        f"run.dir={folder}",
        f"data.batch_size={BATCH}",
        "checkpoint.every=1ba",
        "checkpoint.keep=20",
        "logging.progress=none",
        *case.words,
        *more,
    ]


def train(folder: Path, case: Case, *more: str) -> Result:
    """A `fit` as in a new process."""
    keras.utils.clear_session()
    tf.random.set_seed(None)  # a shuffle's seed is made from this one too
    given = case.data(case.rows) if case.data else arrays(case.rows)
    with Trainer(overrides=settings(folder, case, *more), callbacks=case.callbacks()) as trainer:
        history = trainer.fit(case.model, given, validation_data=arrays(6, seed=1)).history
        values = {name: v.numpy().tobytes() for name, v in model_variables(trainer.model)}
        return Result(history, values, trainer.progress.step)


def killed_after(whole: Path, folder: Path, step: int) -> Path:
    """`folder` as a run leaves it that is killed after update `step`."""
    for k in (step - 1, step):
        name = f"step-{k:08d}"
        if k > 0 and not (folder / "checkpoints" / name).exists():
            shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)
    return folder


def resumed(whole: Path, folder: Path, case: Case, step: int, *more: str) -> Result:
    """The rest of a run that was killed after update `step`."""
    here, killed = distributed.current_world(), folder / f"killed-{step}"
    if here.is_root:
        killed_after(whole, killed, step)
    here.barrier("checkpoints of a killed run")
    return train(killed, case, *more)


def seen(run: Callable[[], Result]) -> tuple[Result, list[str]]:
    """A run's result, and digests of the batches that it was trained on."""
    _seen.clear()
    return run(), list(_seen)


# Models


class Recording(keras.Sequential):
    """Notes the batches that it is trained on."""

    def train_step(self, batch: Any) -> Any:
        if all(hasattr(part, "numpy") for part in batch):  # not while it is traced
            digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in batch))
            _seen.append(digest.hexdigest())
        return super().train_step(batch)


def network(kind: type = keras.Sequential) -> Any:
    """Everything that has a state: dropout, moving statistics."""
    inner = [layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)]
    return kind([keras.Input((6,)), *inner, layers.Dense(3)])


def classes() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def with_callbacks() -> Any:
    model = network(Recording)
    model.compile(keras.optimizers.Adam(0.05), classes(), metrics=["accuracy"], run_eagerly=True)
    return model


def judging() -> list[Any]:
    """Each epoch after the first counts as none better: the rate falls at the end of the third,
    the run stops at the end of the fourth, with the weights of the first."""
    common = {"monitor": "val_loss", "min_delta": 100.0}
    return [
        keras.callbacks.ReduceLROnPlateau(**common, patience=2, factor=0.5),
        keras.callbacks.EarlyStopping(**common, patience=3, restore_best_weights=True),
    ]


def half_precision() -> Any:
    """With a loss scale that overflows at first, and grows every third update."""
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=2.0**20, dynamic_growth_steps=3
    )
    model = network()
    model.compile(scaled, classes(), metrics=["accuracy"], run_eagerly=True)
    return model


def double() -> Any:
    """In float64, without what depends on which rows are together on a rank."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.05), classes(), metrics=["accuracy"])
    return model


def compiled(rate: Any = 0.05) -> Any:
    model = network()
    model.compile(keras.optimizers.Adam(rate), classes(), metrics=["accuracy"])
    return model


def scheduled() -> Any:
    return compiled(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9))


# Data of other kinds


def shuffled_pipeline(rows: int) -> Any:
    data = tf.data.Dataset.from_tensor_slices(arrays(rows))
    return data.shuffle(rows, seed=3).batch(BATCH)


def pipeline_that_waits(rows: int) -> Any:
    """For 1.5 s before its fifth batch."""

    def waits(number: Any, batch: Any) -> Any:
        microseconds = tf.where(number == 4, tf.constant(1_500_000, tf.int64), 0)
        return tf.data.Dataset.from_tensors(batch).apply(sleep(microseconds))

    batches = shuffled_pipeline(rows)
    return batches.enumerate().flat_map(waits)


def unseeded_pipeline(rows: int) -> Any:
    """In an order that cannot be made a second time."""
    return tf.data.Dataset.from_tensor_slices(arrays(rows)).shuffle(rows).batch(BATCH)


class Turning(keras.utils.PyDataset):
    """Puts its rows in another order at the end of each epoch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.x, self.y = arrays(rows)
        self.turns = 0

    def __len__(self) -> int:
        return -(-len(self.x) // BATCH)

    def __getitem__(self, index: int) -> Any:
        order = np.roll(np.arange(len(self.x)), 3 * self.turns)
        chosen = order[index * BATCH : (index + 1) * BATCH]
        return self.x[chosen], self.y[chosen]

    def on_epoch_end(self) -> None:
        self.turns += 1


def generated(rows: int) -> Any:
    def batches() -> Iterator[Any]:
        x, y = arrays(rows)
        for start in range(0, rows, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    return batches


_FOUR_EPOCHS = ("trainer.epochs=4",)
CASES = {
    "callbacks": Case(with_callbacks, 8, ("trainer.epochs=6",), judging),
    "precision": Case(
        half_precision,
        15,
        ("trainer.epochs=4", "trainer.accumulate=2", "trainer.precision=mixed_float16",
         "trainer.clip.global_norm=1.0", "lr.schedule=[{start: 5ba, multiplier: 0.1}]"),
    ),
    "compiled": Case(scheduled, 8, _FOUR_EPOCHS),
    "judged": Case(compiled, 8, ("trainer.epochs=6",), judging),
    "short": Case(double, 8, ("trainer.epochs=2",)),
    "judged, tf.data": Case(compiled, 8, ("trainer.epochs=6",), judging, shuffled_pipeline),
    "compiled, tf.data": Case(compiled, 14, ("trainer.epochs=2",), data=shuffled_pipeline),
    "compiled, PyDataset": Case(compiled, 14, ("trainer.epochs=2",), data=Turning),
    "tf.data": Case(with_callbacks, 14, ("trainer.epochs=2",), data=shuffled_pipeline),
    "slow tf.data": Case(compiled, 32, (), data=pipeline_that_waits),
    "unseeded tf.data": Case(with_callbacks, 32, (), data=unseeded_pipeline),
    "generator": Case(with_callbacks, 14, ("trainer.epochs=2",), data=generated),
    "double": Case(double, 15, ("trainer.epochs=2",)),
    "double, PyDataset": Case(double, 15, ("trainer.epochs=2",), data=Turning),
    "double, tf.data": Case(double, 15, ("trainer.epochs=2",), data=shuffled_pipeline),
}  # fmt: skip
