"""A small model, its data, a quiet Trainer and a callback that watches, for tests of settings."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from ktrainer import Callback, Trainer

ROWS, BATCH = 24, 4  # six batches an epoch


def data(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype(keras.config.floatx())
    return x, random.integers(0, 3, rows)


def build(
    optimizer: keras.optimizers.Optimizer | None = None, eager: bool = True, **compiled: Any
) -> keras.Model:
    """A small model; eager, because tracing takes longer than the few steps of a test."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled = {"metrics": ["accuracy"], **compiled}
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, loss, run_eagerly=eager, **compiled)
    return model


def trainer(callbacks: Any = (), **settings: Any) -> Trainer:
    """A quiet Trainer; settings as `trainer__epochs=3`."""
    config = {
        "data": {"batch_size": BATCH, "shuffle": False},
        "logging": {"progress": "none", "csv": False},
        "checkpoint": {"resume": "never"},
    }
    words = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return Trainer(config, callbacks, words)


def fit(
    model: Any = build, given: Any = None, validation: Any = None, **settings: Any
) -> tuple[Trainer, dict[str, list[float]]]:
    with trainer(**settings) as it:
        history = it.fit(model, given or data(), validation_data=validation)
        return it, history.history


def weights(of: Any) -> list[np.ndarray]:
    return [np.array(v.numpy()) for v in (of.model if isinstance(of, Trainer) else of).weights]


def close(ours: Any, theirs: Any, tolerance: float) -> None:
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class Watch(Callback):
    """Writes down when things happen."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.validated: list[int] = []
        self.inside: list[int] = []
        self.logged: list[int] = []
        self.tested = 0

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.steps.append(step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.batches.append(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        self.validated.append(self.progress.step)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tested += 1

    def on_validation_end(self, step: int, logs: Any) -> None:
        assert all(key.startswith("val_") for key in logs)
        self.inside.append(step)

    def on_log(self, step: int, logs: Any) -> None:
        assert np.isfinite(list(logs.values())).all()
        self.logged.append(step)


class Listens(keras.callbacks.Callback):
    """Notes the events of batches, and need not act between the updates of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def max_updates_per_call(self) -> int | None:
        return None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.heard.append(("begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.heard.append(("end", batch, {**logs}))


def watch(validation: Any = None, **settings: Any) -> tuple[Watch, Trainer, dict[str, Any]]:
    seen = Watch()
    with trainer([seen], **settings) as it:
        history = it.fit(build, data(), validation_data=validation)
        return seen, it, history.history
