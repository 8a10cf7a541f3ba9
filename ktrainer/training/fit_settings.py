"""Settings of one call of `fit` from its configuration: steps, data and callbacks; model checks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.callbacks import LossGuard
from ktrainer.callbacks.base import writes_files
from ktrainer.errors import ModelError
from ktrainer.runtime.devices import accelerator
from ktrainer.steps import Clip, StepOptions
from ktrainer.steps.update_guard import UpdateGuard, has_keras_step, loss_metric

if TYPE_CHECKING:
    from ktrainer.config import Config, DataConfig
    from ktrainer.distributed import World
    from ktrainer.verify.update_split import Split


def guard_of(callbacks: list[Any], model: keras.Model) -> UpdateGuard | None:
    """The guard that skips bad updates, if one of the callbacks asks for it.

    Raises:
        ModelError: it cannot be told of this model's steps what their loss is.
    """
    found = next((c for c in callbacks if isinstance(c, LossGuard)), None)
    if found is None or found.spike is None:
        return None if found is None else found.guard
    if loss_metric(model) is None and not has_keras_step(model):
        raise ModelError(
            f"health.spike needs to know the loss of a step, but model {model.name!r} has no "
            "metric keras.metrics.Mean(name='loss') that its train_step updates: add one to its "
            "`metrics`."
        )
    if found.on_spike == "skip" and not has_keras_step(model):
        raise ModelError(
            "health.on_spike=skip must know the loss before gradients are applied, which it can in "
            f"Keras' own train_step only, and {type(model).__name__} has its own. Set "
            "health.on_spike to stop or rollback."
        )
    return found.guard


def step_options(
    config: Config, hooks: tuple[Any, ...] = (), guard: UpdateGuard | None = None
) -> StepOptions:
    """How steps run, from the configuration."""
    clip = config.trainer.clip
    return StepOptions(
        accumulate=config.trainer.accumulate,
        xla=config.trainer.xla,
        clip=Clip(clip.global_norm, clip.norm, clip.value),
        average=getattr(config.backend, "op", "average") == "average",
        hooks=hooks,
        guard=guard,
        loss_scope=config.trainer.loss_scope,
    )


def data_config(config: Config) -> DataConfig:
    """The `data` section; unshuffled with `trainer.overfit_batches`."""
    if config.trainer.overfit_batches:
        return replace(config.data, shuffle=False)
    return config.data


def callbacks_config(config: Config) -> Config:
    """The configuration of callbacks: the trainer says where a `fit` saves, once it is known which
    one it is; a `fast_dev_run` leaves no files."""
    if not config.trainer.fast_dev_run:
        return config.with_changes(checkpoint=replace(config.checkpoint, dir=None))
    return config.with_changes(
        checkpoint=replace(config.checkpoint, every=None, best=None, mode="auto"),
        logging=replace(config.logging, csv=False, tensorboard=False),
    )


def callbacks_without_files(callbacks: Sequence[Any], world: World) -> list[Any]:
    """The callbacks of a `fast_dev_run`: Keras' that write files would replace, or remove, those of
    a training. Says which these are."""
    names = dict.fromkeys(type(c).__name__ for c in callbacks if writes_files(c))
    if names and world.is_root:
        warnings.warn(
            "trainer.fast_dev_run tries the program and leaves no files, so these callbacks do not "
            f"run: {', '.join(names)}",
            stacklevel=2,
        )
    return [c for c in callbacks if not writes_files(c)]


def versions_that_compute() -> dict[str, str]:
    """The versions that ranks must share to compute the same."""
    names = ("ktrainer", "keras", "numpy", "tensorflow")
    return {name: str(getattr(import_module(name), "__version__", "?")) for name in names}


def check_model(model: keras.Model, config: Config) -> None:
    """Refuse a model that `fit` could not train as configured; warn of what cuDNN may get wrong.

    Raises:
        ModelError: it is not compiled, or its layers have another precision than asked for.
    """
    if not model.compiled:
        raise ModelError(
            f"model {model.name!r} is not compiled; call model.compile(optimizer, loss, ...) first"
        )
    wanted = config.trainer.precision
    if wanted is not None and model.dtype_policy.name != wanted:
        raise ModelError(
            f"trainer.precision={wanted}, but model {model.name!r} was made with "
            f"{model.dtype_policy.name}: layers fix their precision when they are made. Make the "
            "Trainer before the model, or pass fit a function that makes it."
        )
    if accelerator() is not None:
        _warn_of_masks_for_cudnn(model)


def refuse_stateful_layers(model: keras.Model, split: Split) -> None:
    """Refuse layers that keep a state for each row of a batch, where batches are cut.

    Raises:
        ModelError: naming one.
    """
    if split.replicas * split.microbatches == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ModelError(
                f"layer {layer.name!r} has stateful=True: it keeps a state for each row of a whole "
                f"batch, and batches are cut here for {split}. Train the model with backend=local; "
                "or make the layer without stateful=True, and let sequences be longer."
            )


def _warn_of_masks_for_cudnn(model: keras.Model) -> None:
    """Warn of masks in a model of which Keras computes layers by cuDNN: TensorFlow does that wrong,
    https://github.com/tensorflow/tensorflow/issues/60192."""
    layers, recurrent = list(model._flatten_layers()), (keras.layers.LSTM, keras.layers.GRU)
    masked = any(getattr(x, "mask_zero", isinstance(x, keras.layers.Masking)) for x in layers)
    by_cudnn = [x.name for x in layers if isinstance(x, recurrent) and x.use_cudnn is not False]
    if masked and by_cudnn:
        warnings.warn(
            f"the model has a mask, and layer {by_cudnn[0]!r} may get wrong numbers: on a GPU "
            "Keras computes it by cuDNN, which TensorFlow does wrong now and then where there is a "
            "mask (tensorflow issue 60192). Make LSTM and GRU layers with use_cudnn=False.",
            stacklevel=2,
        )
