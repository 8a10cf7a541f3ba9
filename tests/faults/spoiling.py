"""Runs of eight batches, one of which would spoil the model; and the same without it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from ktrainer import Callback, Trainer
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.steps.named_variables import model_variables
from tests.dist.harness import leaks
from tests.faults.asking import BACKENDS
from tests.tf_distribute.running import make_devices

BATCH, BATCHES = 8, 8
SPIKE = ("health.spike=5", "health.on_spike=skip", "health.spike_window=2")
ROLLBACK = ("health.nan=rollback", "checkpoint.every=2ba")


class Result(dict[str, bytes]):
    """Variables by name, without the states of seeds: what a batch drew stays drawn."""

    history: dict[str, list[float]]
    step: int
    steps: list[int]  # of the checkpoints, at the end
    said: list[str]  # warnings


def model() -> Any:
    dense = layers.Dense
    net = keras.Sequential(
        # No ReLU: with oneDNN it makes a zero of a NaN.
        [keras.Input((6,)), dense(8, "tanh"), layers.BatchNormalization(), dense(3)]
    )
    net.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return net


def rows(bad: dict[int, float], without: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Batches, from 1; in each of `bad` the last two rows, those of the last rank, are times a
    number; those of `without` are not there."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES, BATCH, 6)).astype("float32")
    for number, factor in bad.items():
        x[number - 1, -2:] *= factor
    kept = [i for i in range(BATCHES) if i + 1 not in without]
    flat = x[kept].reshape(-1, 6)
    return flat, flat[:, :3]


def train(
    folder: Path,
    words: Sequence[str],
    bad: dict[int, float] | None = None,
    without: Sequence[int] = (),
    callbacks: Sequence[Callback] = (),
    build: Any = model,
) -> Result:
    own = ("logging.progress=none", f"data.batch_size={BATCH}", "data.shuffle=false", "seed=1")
    keras.utils.clear_session()  # equal names
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = [*own, f"run.dir={folder}", "checkpoint.keep=20", *words]
        with Trainer(overrides=settings, callbacks=callbacks) as trainer:
            history = trainer.fit(build, rows(bad or {}, without)).history
            values = model_variables(trainer.model)
            found = Result({n: v.numpy().tobytes() for n, v in values if "seed" not in n})
            found.history, found.step = history, trainer.progress.step
            trainer.world.barrier("checkpoints are there")
            found.steps = sorted(e.step for e in Store(trainer.checkpoint_dir).entries())
    found.said = [str(w.message) for w in caught if w.category is UserWarning]
    return found


def differences(found: Result, expected: Result) -> list[str]:
    names = [name for name in expected if found[name] != expected[name]]
    if found.history != expected.history:
        names.append(f"History {found.history} instead of {expected.history}")
    return names


def on_ranks(directory: str, backend: str, what: Sequence[str], *words: str) -> list[list[str]]:
    """For each of `what`, in what the run with a bad batch differs from the one without it."""
    if backend == "strategy":
        make_devices()
    folder, words = Path(directory), (*BACKENDS.get(backend, ()), *words)
    found: list[list[str]] = []
    expected: dict[tuple[int, ...], Result] = {}
    for name in what:
        more, bad, without = CASES[name]
        if without not in expected:
            expected[without] = train(folder / f"without {without}", words, without=without)
        run = train(folder / name, (*words, *more), bad)
        # A rollback starts the epoch's metrics over.
        if name == "rollback":
            run.history = expected[without].history
            assert run.steps == [2, 4, 6], run.steps
        updates = BATCHES // int(dict(w.split("=") for w in words).get("trainer.accumulate", 1))
        assert run.step == (6 if name == "rollback" else updates), name
        found.append(differences(run, expected[without]))
    if backend == "workers":
        leaks.expect_ports()
    return found


def stopped(directory: str, *words: str) -> tuple[int, list[int], list[str]]:
    """(the last step, steps of checkpoints, warnings) of a run in which NaN stops all."""
    found = train(Path(directory), ("checkpoint.every=1ba", *words), {4: math.nan})
    return found.step, found.steps, found.said


CASES: dict[str, tuple[tuple[str, ...], dict[int, float], tuple[int, ...]]] = {
    "nan": (("health.nan=skip",), {3: math.nan}, (3,)),
    "inf": (("health.nan=skip",), {3: math.inf}, (3,)),
    "spike": (SPIKE, {3: 1000.0}, (3,)),
    "spike in parts": (SPIKE, {5: 1000.0}, (5, 6)),
    "rollback": (ROLLBACK, {6: math.nan}, (5, 6)),
}
