"""A small model and a quiet data-parallel Trainer, for functions that run on ranks."""

from __future__ import annotations

from typing import Any

import pytest

ENGINES = ["mpi", pytest.param("horovod", marks=pytest.mark.horovod)]


def more(*values: Any) -> Any:
    """Parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def group_mode(engine: str) -> str:
    """The kind of group that an engine needs: Horovod's thread stays in a process for good."""
    return "horovod" if engine == "horovod" else ""


def make_trainer(callbacks: tuple[Any, ...] = (), **settings: Any) -> Any:
    from ktrainer import Trainer

    words = ["backend=data_parallel", *(f"{k.replace('__', '.')}={v}" for k, v in settings.items())]
    return Trainer({"logging": {"progress": "none", "csv": False}}, callbacks, words)


def small_model(units: int = 8, extra: tuple[Any, ...] = ()) -> Any:
    import keras

    # No ReLU: with oneDNN it makes a zero of a NaN.
    layers = [keras.Input((8,)), keras.layers.Dense(units, activation="softplus"), *extra]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


def weights_of(model: Any) -> bytes:
    return b"".join(v.numpy().tobytes() for v in model.variables)
