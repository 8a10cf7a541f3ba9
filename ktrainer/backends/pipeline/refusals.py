"""What a pipeline refuses of a compiled model and of callbacks, before anything is traced.

`fit` and `ktrainer plan` ask the same questions here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from ktrainer.errors import ConfigError, ModelError

_STEPS = ("train_step", "test_step", "predict_step")
_WHOLE_MODEL = ("ModelCheckpoint", "BackupAndRestore", "SwapEMAWeights", "OrbaxCheckpoint")


def refuse_model(model: keras.Model, replicas: int) -> None:
    """Refuse a model that a pipeline cannot train as it was compiled.

    Raises:
        ModelError: it has steps of its own, runs eagerly, meets its replicas in the forward pass,
            or its optimizer keeps an average of the weights, or gradients.
    """
    _refuse_steps(model)
    if model.compiled and model.run_eagerly:
        raise ModelError(
            f"model {model.name!r} was compiled with run_eagerly=True, but a pipeline compiles "
            "its stages; leave it out, or debug with backend=local"
        )
    for layer in model._flatten_layers():
        if replicas > 1 and getattr(layer, "synchronized", False):
            raise ModelError(
                f"{layer.name!r} has synchronized=True, but replicas of a pipeline do not meet in "
                "the forward pass; leave it out, or train with backend=data_parallel"
            )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        _refuse_optimizer(getattr(optimizer, "inner_optimizer", optimizer))


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse Keras' callbacks that save or swap the weights of a whole model.

    Raises:
        ConfigError: naming what does the same here.
    """
    every = keras.callbacks
    kinds = tuple(getattr(every, name) for name in _WHOLE_MODEL if hasattr(every, name))
    for callback in callbacks:
        histograms = bool(getattr(callback, "histogram_freq", 0))
        routed = getattr(callback, "on_every_rank", False)
        if (isinstance(callback, kinds) and not routed) or histograms:
            what = type(callback).__name__ + ("(histogram_freq=...)" if histograms else "")
            raise ConfigError(
                f"{what} needs the weights of the whole model, which no process of a pipeline "
                "has: set checkpoint.every or checkpoint.best, and call trainer.save at the end.",
                path="callbacks",
                value=type(callback).__name__,
            )


def _refuse_steps(model: keras.Model) -> None:
    """Steps of a model's own need all of the model in one process."""
    for name in _STEPS:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{type(model).__name__}.{name} is the model's own, and a pipeline runs a model in "
                "parts, so it cannot call it. Override `compute_loss` or `compute_metrics`, which "
                "work, or train with backend=data_parallel."
            )


def _refuse_optimizer(optimizer: Any) -> None:
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        key = "use_ema" if optimizer.use_ema else "gradient_accumulation_steps"
        remedy = "leave it out" if optimizer.use_ema else "set trainer.accumulate instead"
        raise ModelError(
            f"{type(optimizer).__name__}({key}=...) is not supported in a pipeline: {remedy}"
        )
