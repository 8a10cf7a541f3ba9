"""Small models, data, and a look at every step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from ktrainer.distributed import SingleWorld


class Sized(SingleWorld):
    """One process that believes in a world of `size`: for what depends on the number alone."""

    def __init__(self, size: int) -> None:
        self.size = size


class EachStep(keras.callbacks.Callback):
    """Keeps what `look(model)` returns after each batch."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.look(self.model))


def rate_of(model: Any) -> float:
    return float(model.optimizer.learning_rate)


def data(rows: int = 50, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4), scale=0.2).astype("float32")  # tame at any rate used here
    return x, x.sum(axis=1, keepdims=True)


def small_model(optimizer: Any = None, seed: int = 0, **compiled: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )
    # Eager: tracing takes a hundred times as long as the few steps of a test.
    compiled = {"loss": "mse", "metrics": ["mae"], "run_eagerly": True, **compiled}
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), **compiled)
    return model


def fit(model: Any, callbacks: list[Any], epochs: int = 1, rows: int = 50, **kwargs: Any) -> Any:
    """Plain Keras, five batches an epoch of 50 rows."""
    x, y = data(rows)
    kwargs = {"batch_size": 10, "verbose": 0, "shuffle": False, **kwargs}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **kwargs)


def everything(model: Any) -> list[np.ndarray]:
    """All variables of the model and its optimizer."""
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]
