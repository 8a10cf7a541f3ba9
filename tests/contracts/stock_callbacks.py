"""Keras' callbacks, and a user's own, at work: what each does in a training, and what is left."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as stock

from ktrainer import Trainer
from ktrainer.distributed import current_world
from tests.contracts import zoo
from tests.contracts.running import (
    BATCH,
    ROWS,
    SEED,
    VALIDATION_ROWS,
    Outcome,
    config,
    outcome_of,
)

EPOCHS = 4


class Recorder(stock.Callback):
    """A user's callback: writes down every event, and the logs of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.events.append(("epoch_end", epoch, {key: float(logs[key]) for key in logs}))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        self.events.append(("train_batch_end", batch, sorted(logs), rate, self.params["steps"]))


def _note(event: str, numbered: bool) -> Callable[..., None]:
    def with_number(self: Any, number: int, logs: Any = None) -> None:
        self.events.append((event, number, sorted(logs or {})))

    def without(self: Any, logs: Any = None) -> None:
        self.events.append((event, sorted(logs or {})))

    return with_number if numbered else without


for _event in ("epoch_begin", "train_batch_begin", "test_batch_begin", "test_batch_end"):
    setattr(Recorder, f"on_{_event}", _note(_event, numbered=True))
for _event in ("train_begin", "train_end", "test_begin", "test_end"):
    setattr(Recorder, f"on_{_event}", _note(_event, numbered=False))


class Crash(stock.Callback):
    """Ends the first run in the middle of its third epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (2, 1):
            raise InterruptedError


class StopOn(stock.Callback):
    """Stops after a batch, on one rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if current_world().rank == self.rank and batch == 1:
            self.model.stop_training = True


@dataclass(frozen=True)
class Scenario:
    """Callbacks that may write below a folder, and what else a run with them needs."""

    make: Callable[[Path], list[stock.Callback]]
    optimizer: Callable[[], keras.optimizers.Optimizer] = lambda: keras.optimizers.SGD(0.05)
    crash: bool = False
    bad_row: int | None = None
    cut: bool = False  # stops in the middle of an epoch


def averaging() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)


# The loss falls from epoch to epoch; `mode="max"` takes that for getting worse.
SCENARIOS = {
    "EarlyStopping": Scenario(
        lambda to: [stock.EarlyStopping("loss", mode="max", patience=2, restore_best_weights=True)]
    ),
    "ReduceLROnPlateau": Scenario(
        lambda to: [stock.ReduceLROnPlateau("val_loss", mode="max", factor=0.5, patience=1)]
    ),
    "LearningRateScheduler": Scenario(
        lambda to: [stock.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]
    ),
    "ModelCheckpoint": Scenario(
        lambda to: [
            stock.ModelCheckpoint(to / "{epoch:02d}.keras"),
            stock.ModelCheckpoint(to / "best.weights.h5", "val_loss", 0, True, True),
            stock.ModelCheckpoint(to / "{batch}.weights.h5", save_weights_only=True, save_freq=2),
        ]
    ),
    "CSVLogger": Scenario(lambda to: [stock.CSVLogger(to / "log.csv")]),
    "TensorBoard": Scenario(lambda to: [stock.TensorBoard(to / "tb", update_freq=1)]),
    "BackupAndRestore": Scenario(lambda to: [stock.BackupAndRestore(to / "backup")], crash=True),
    "LambdaCallback": Scenario(
        lambda to: [
            stock.LambdaCallback(
                on_epoch_end=lambda epoch, logs: (
                    (to / f"{epoch}.txt").write_text("") if current_world().is_root else None
                )
            )
        ]
    ),
    "SwapEMAWeights": Scenario(lambda to: [stock.SwapEMAWeights(True)], averaging),
    "TerminateOnNaN": Scenario(lambda to: [stock.TerminateOnNaN()], bad_row=28, cut=True),
    "user's own": Scenario(lambda to: [StopOn(rank=0)], cut=True),
    "user's own, on another rank": Scenario(lambda to: [StopOn(rank=1)]),
}


@dataclass
class Run:
    """What a scenario left behind."""

    outcome: Outcome
    events: list[Any]
    files: list[str]
    scalars: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def play(name: str, folder: Path, how: Any, eager: bool = False) -> Run:
    """Run a scenario with `how`: "keras", a backend's name, or pairs of its keys and values."""
    folder.mkdir(parents=True)
    scenario = SCENARIOS[name]
    recorders = [Recorder(), Recorder()]
    if scenario.crash:
        with pytest.raises(InterruptedError):
            _fit(scenario, [*scenario.make(folder), Crash(), recorders[0]], how, eager)
    outcome = _fit(scenario, [*scenario.make(folder), recorders[1]], how, eager)
    return Run(
        outcome,
        recorders[0].events + recorders[1].events,
        sorted(p.relative_to(folder).parts[0] for p in folder.rglob("*") if p.is_file()),
        _scalars(folder),
        {p.name: p.read_text() for p in folder.glob("*.csv")},
    )


def _fit(scenario: Scenario, callbacks: list[Any], how: Any, eager: bool) -> Outcome:
    keras.utils.clear_session()
    x, y = zoo.features_and_labels(ROWS)
    if scenario.bad_row is not None:
        x[scenario.bad_row] = math.nan
    validation = zoo.features_and_labels(VALIDATION_ROWS)

    def build() -> keras.Model:
        keras.utils.set_random_seed(SEED)
        model = zoo.small_mlp(scenario.optimizer())
        model.run_eagerly = eager
        return model

    if how == "keras":
        history = build().fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=False,
            validation_data=validation,
            callbacks=callbacks,
            verbose=0,
        )
        return outcome_of(history.model, history)
    backend = how if isinstance(how, str) else dict(how)
    settings = config(backend=backend, trainer={"epochs": EPOCHS}, health={"nan": "ignore"})
    with Trainer(settings) as trainer:
        history = trainer.fit(build, (x, y), validation_data=validation, callbacks=callbacks)
        return outcome_of(trainer.model, history)


def _scalars(folder: Path) -> dict[str, list[float]]:
    """What TensorBoard would show, by file and tag; speeds differ from run to run."""
    found: dict[str, list[float]] = {}
    for path in sorted(folder.rglob("*.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.HasField("tensor") and "per_second" not in value.tag:
                    number = tf.make_ndarray(value.tensor)
                    if number.dtype == np.float32:
                        found.setdefault(f"{path.parent.name}/{value.tag}", []).append(
                            number.item()
                        )
    return found


# Those that read or set what a model and its optimizer hold.
HOLDING = ["EarlyStopping", "ModelCheckpoint", "BackupAndRestore", "SwapEMAWeights"]
# With those that decide; the others only watch.
TOUCHING = [*HOLDING, "ReduceLROnPlateau", "LearningRateScheduler", "TerminateOnNaN", "user's own"]


def play_all(
    folder: Path, how: Any = "data_parallel", names: Iterable[str] = SCENARIOS
) -> dict[str, Run]:
    """Scenarios, one after another, on this rank."""
    mine = folder / f"rank{current_world().rank}"
    return {name: play(name, mine / str(i), how) for i, name in enumerate(names)}


@functools.cache
def alone(name: str) -> Run:
    """A scenario in one process, compiled as little as on one's own; once a session."""
    with tempfile.TemporaryDirectory() as folder:
        return play(name, Path(folder) / "alone", "local", eager=True)


def compare(ours: Run, theirs: Run) -> None:
    """The same files, events and epochs, and but for rounding the same numbers."""
    assert ours.files == theirs.files
    assert len(ours.events) == len(theirs.events)
    assert ours.outcome.epochs == theirs.outcome.epochs
    for key, values in theirs.outcome.history.items():
        np.testing.assert_allclose(ours.outcome.history[key], values, rtol=1e-4, err_msg=key)
    pairs = zip(ours.outcome.weights, theirs.outcome.weights, strict=True)
    for (_, mine), (path, value) in pairs:
        np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-6, err_msg=path)
