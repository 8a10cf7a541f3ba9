"""Refusals: models and callbacks that no pipeline can train, found before tracing.

Used by `fit` and `ktrainer plan` alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from ktrainer.config import PipelineConfig
from ktrainer.errors import ConfigError, ModelError
from ktrainer.steps import StepOptions
from ktrainer.steps.optimizers import optimizers_of

_WHOLE_MODEL = ("BackupAndRestore", "OrbaxCheckpoint")
# One's slots begin with the values of all weights, the other's belong to optimizers inside of it.
_UNPLACEABLE = ("ScheduleFreeAdamW", "MultiOptimizer")


def refuse_model(model: keras.Model, replicas: int) -> None:
    """Refuse a model that a pipeline cannot train as it was compiled.

    Raises:
        ModelError: it runs eagerly, synchronizes replicas in the forward pass, its optimizer
            accumulates gradients or has slots that cannot be placed, or its own `train_step` has
            several.
    """
    if model.compiled and model.run_eagerly:
        raise ModelError(
            f"model {model.name!r} was compiled with run_eagerly=True, but a pipeline compiles "
            "its stages; remove it, or debug with backend=local"
        )
    for layer in model._flatten_layers():
        if replicas > 1 and getattr(layer, "synchronized", False):
            raise ModelError(
                f"{layer.name!r} has synchronized=True, but replicas of a pipeline do not "
                "synchronize in the forward pass; remove it, or train with backend=data_parallel"
            )
    # A model with Keras' own train_step applies the compiled one alone; layers that are models may
    # have been compiled too.
    own_step = type(model).train_step is not keras.Model.train_step
    if own_step and len(optimizers_of(model)) > 1:
        raise ModelError(
            f"model {model.name!r} has several optimizers, whose slots a pipeline cannot place: it "
            "knows the variables of the compiled one alone. Use one optimizer, or train with "
            "backend=data_parallel."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        _refuse_optimizer(getattr(optimizer, "inner_optimizer", optimizer))


def refuse_layers(model: keras.Model) -> None:
    """Refuse layers that train otherwise on parts of a batch.

    Raises:
        ModelError: naming one.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise ModelError(explain_assigned_weight(layer.name))
        if getattr(layer, "_remat_mode", None) is not None:
            raise ModelError(
                f"{layer.name!r} was made in a keras.RematScope, under which a pipeline would lose "
                "its weights' gradients. Leave the scope out, and set backend.recompute=true"
            )
        if getattr(layer.dtype_policy, "quantization_mode", None) == "float8":
            raise ModelError(
                f"{layer.name!r} computes in float8, with scales from the largest values of a "
                "whole batch, which a pipeline does not have; use backend=local"
            )


def refuse_penalty(model: keras.Model) -> None:
    """Refuse a model with a penalty on its own outputs: no loss of a pipeline counts it.

    Raises:
        ModelError: the model has one.
    """
    if model.activity_regularizer is not None:
        raise ModelError(
            f"model {model.name!r} has an activity_regularizer, but a pipeline counts those of "
            "layers alone; give it to the layer that computes the outputs"
        )


def explain_assigned_weight(layer: str) -> str:
    """Why a layer that assigns its weights is refused, and what to do."""
    return (
        f"{layer!r} assigns a weight in the forward pass, as SpectralNormalization does. A "
        "pipeline would do so once for each microbatch, and one process once for the batch; use "
        "backend=data_parallel"
    )


def refuse_captured_weights(weights: Sequence[Any], stage: int) -> None:
    """Refuse trained weights that a stage reads by itself, whose gradients it would not compute.

    Raises:
        ModelError: naming one.
    """
    if weights:
        raise ModelError(
            f"{weights[0].path!r} is read on stage {stage} by a layer that does not track it, or "
            "inside of a tf.function, so that its gradient there would be lost. Make the layer of "
            "that weight an attribute of the layer that reads it, or put both on one stage, with "
            "backend.stages or `with ktrainer.partition(i):`; remove the tf.function"
        )


def refuse_settings(model: keras.Model, options: StepOptions, config: PipelineConfig) -> None:
    """Refuse settings with which a step of a model's own cannot run in stages.

    Raises:
        ModelError: naming the setting.
    """
    refused = {
        "trainer.accumulate": (options.accumulate > 1, "1: the step gets a whole batch"),
        "trainer.xla": (options.xla, "false: XLA cannot compile messages between stages"),
        "backend.chunks": (config.chunks > 1, "1"),
        "backend.recompute": (config.recompute, "false"),
        "health.nan or health.on_spike": (options.guard is not None, "stop or rollback, not skip"),
    }
    for key, (given, advice) in refused.items():
        if given:
            raise ModelError(
                f"{type(model).__name__} has a step of its own, which a pipeline runs whole in "
                f"every process; that cannot be with this value of {key}. Set it to {advice}, or "
                "train with backend=data_parallel."
            )


def refuse_callbacks(callbacks: Iterable[Any]) -> None:
    """Refuse Keras' callbacks that restore or look at the weights of a whole model.

    Raises:
        ConfigError: naming what does the same here.
    """
    every = keras.callbacks
    kinds = tuple(getattr(every, name) for name in _WHOLE_MODEL if hasattr(every, name))
    for callback in callbacks:
        histograms = bool(getattr(callback, "histogram_freq", 0))
        if isinstance(callback, kinds) or histograms:
            what = type(callback).__name__ + ("(histogram_freq=...)" if histograms else "")
            raise ConfigError(
                f"{what} needs the weights of the whole model, which no process of a pipeline "
                "has: set checkpoint.every or checkpoint.best, and call trainer.save at the end.",
                path="callbacks",
                value=type(callback).__name__,
            )


def _refuse_optimizer(optimizer: Any) -> None:
    every = keras.optimizers
    kinds = tuple(getattr(every, name) for name in _UNPLACEABLE if hasattr(every, name))
    if isinstance(optimizer, kinds):
        raise ModelError(
            f"{type(optimizer).__name__} is not supported in a pipeline, where each process keeps "
            "the optimizer's state of its own stage alone, which this one does not allow. Use "
            "another optimizer, or train with backend=data_parallel."
        )
    if optimizer.gradient_accumulation_steps:
        raise ModelError(
            f"{type(optimizer).__name__}(gradient_accumulation_steps=...) is not supported in a "
            "pipeline: set trainer.accumulate instead"
        )
