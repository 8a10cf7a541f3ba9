"""Keras models that are cut into stages at their first call inside of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from ktrainer.backends.pipeline.check_supported import refuse_layers, refuse_penalty
from ktrainer.backends.pipeline.graph.call_recorder import CALLED_BY_USER
from ktrainer.backends.pipeline.graph.stage_scopes import partition as on_stage
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.global_norm import count_over_stages, forget_stages
from ktrainer.backends.pipeline.runtime.model_call import single_input
from ktrainer.backends.pipeline.runtime.stage_checks import (
    refuse_empty_stages,
    refuse_shared_statistics,
)
from ktrainer.checkpoint.export.keras_file import write_file, write_keras_file
from ktrainer.config import PipelineConfig
from ktrainer.distributed import World
from ktrainer.distributed.collectives import InOrder
from ktrainer.errors import CheckpointError, ConfigError, ModelError
from ktrainer.modelparallel import coroutines, state
from ktrainer.modelparallel.model_call import RUNNER, run_through_stages
from ktrainer.steps.variable_broadcast import equalise_partitions
from ktrainer.steps.variable_placement import placement_of

_hooks: list[Callable[[], Any]] = []


class DistributedModel(keras.Model):
    """A model that is cut into stages, one in each process of a replica.

    Subclass it as `keras.Model`. It is called inside of a function decorated with `step` alone;
    its outputs reach every process of the replica. From the first call on `trainable_variables`
    are those that this process holds.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is DistributedModel and (args or "inputs" in kwargs):
            raise ModelError(
                "DistributedModel(inputs, outputs): make a subclass of DistributedModel, which "
                "calls its layers, or a functional model, in `call`"
            )
        return super().__new__(cls, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(args))
        if symbolic or in_symbolic_scope():
            return super().__call__(*args, **kwargs)
        body = coroutines.current()
        if body is None:
            raise ModelError(
                f"model {self.name!r} is a DistributedModel, cut into stages in several processes: "
                "call it inside of a function decorated with @smp.step alone, where the stages "
                "work together. All processes call that function together."
            )
        inputs, training = single_input(self, args, kwargs)
        return run_through_stages(body, self, inputs, training)

    @property
    def trainable_variables(self) -> list[Any]:
        """Trained variables: those that this process holds, once the model is cut."""
        return _held(self, super().trainable_variables)

    @property
    def trainable_weights(self) -> list[Any]:
        """The same as `trainable_variables`."""
        return _held(self, super().trainable_weights)

    def save_model(self, path: str) -> None:
        """Write the whole model, for plain Keras. All ranks call this together.

        Args:
            path: ends in `.keras`, or in `.weights.h5` for the weights alone.

        Raises:
            ModelError: the model is not cut yet: no step has run.
            CheckpointError: on every rank, when rank 0 cannot write the file.
        """
        _save_whole(self, Path(path))

    @property
    def losses(self) -> list[Any]:
        """Losses that layers have added or that weights have: inside of a step, after the call of
        the model, their sum over all stages.

        Raises:
            ModelError: the model is cut, and has not been called in this step.
        """
        if placement_of(self) is None:
            return cast("list[Any]", super().losses)
        body = coroutines.current()
        if body is None or id(self) not in body.losses:
            raise ModelError(
                f"model {self.name!r} is cut into stages, and losses that layers add, or that "
                "weights have (regularizers), are in different processes: read `losses` inside of "
                "a function decorated with @smp.step, after it has called the model"
            )
        return body.losses[id(self)]


def _held(model: DistributedModel, variables: list[Any]) -> list[Any]:
    """Those that this process holds; all, before the model is cut."""
    placement = placement_of(model)
    return variables if placement is None else [v for v in variables if placement.holds(v)]


def _save_whole(model: Any, path: Path) -> None:
    """Write the whole model atomically, on rank 0. All ranks call this together.

    Args:
        model: was cut into stages.
        path: ends in `.keras`, for a model of Keras' functional API that `keras.models.load_model`
            reads without the script's class and without ktrainer, or in `.weights.h5`, for
            `load_weights` of an unpartitioned model of the same layers.

    Raises:
        ModelError: the model is not cut yet.
        CheckpointError: on every rank, when rank 0 cannot write the file.
    """
    if placement_of(model) is None:
        raise ModelError(
            f"model {model.name!r} has no variables yet: it is cut into stages by its first step. "
            "Save it after that."
        )
    if not path.name.endswith((".keras", ".weights.h5")):
        raise CheckpointError(
            f"{path} does not end in .keras or .weights.h5, the formats that Keras 3 reads"
        )
    write_keras_file(model, path, state.current().world, _write)


def _write(model: Any, path: Path) -> str | None:
    if path.suffix != ".keras":
        return write_file(model, path)
    try:
        graph = vars(model)[RUNNER].planned.graph(False)
        tensors = [graph.tensors[i] for i in graph.inputs]
        made = [keras.Input(tuple(t.shape)[1:], dtype=t.dtype) for t in tensors]
        symbols = keras.tree.pack_sequence_as(graph.input_structure, made)
        whole = keras.Model(symbols, model.call(symbols), name=model.name)
    except Exception as raised:  # of any type: the other ranks wait for an answer
        return (
            f"cannot save the model to {path}: its call cannot be written as a functional model, "
            f"which needs Keras layers and keras.ops instead of TensorFlow's functions: "
            f"{type(raised).__name__}: {raised}. Save {path.stem}.weights.h5 instead."
        )
    return write_file(whole, path)


def cut(model: DistributedModel, inputs: Any) -> PlannedModel:
    """Cut a model into stages, make this process's variables, and run the hooks.

    Args:
        inputs: nested `tf.TensorSpec` of a microbatch of the model's inputs.

    Raises:
        ModelError: it cannot be traced, or stages share what only one can have.
    """
    now = state.current()
    setattr(model, CALLED_BY_USER, True)
    config = pipeline_config(now.settings)
    rows = next((x.shape[0] for x in keras.tree.flatten(inputs)), None) or 1
    planned = PlannedModel(
        model, config, rows * config.microbatches, 1, now.layout, now.world, (now.mp, now.dp), False
    )
    with tf.init_scope():
        planned.place((inputs,))
        refuse_penalty(model)
        refuse_layers(model)
        refuse_shared_statistics(planned)
        refuse_empty_stages(planned)
        _refuse_float16(model)
        if now.mp.size > 1:
            equalise_partitions(model, planned.placement)  # drawn by each, maybe without a seed
            _count_norms(model, now.mp)
        for hook in list(_hooks):
            hook()
    return planned


def pipeline_config(settings: Any) -> PipelineConfig:
    """The settings as keys of `backend=pipeline`."""
    automatic = settings.auto_partition
    return PipelineConfig(
        partitions=settings.partitions,
        microbatches=settings.microbatches,
        schedule=settings.pipeline,
        active_microbatches=(
            settings.active_microbatches if settings.pipeline == "interleaved" else None
        ),
        optimize=settings.optimize,
        memory_weight=settings.memory_weight,
        default_partition=None if automatic else settings.default_partition,
        placement=settings.placement_strategy,
    )


def _count_norms(model: DistributedModel, stages: World) -> None:
    """Let the global norm of the gradients of `model` be that over all stages."""

    def total(value: tf.Tensor) -> tf.Tensor:
        what = "global norm of gradients over stages"
        (found,) = InOrder().on_host(
            lambda part: stages.oob_allreduce(part, "sum", what), [value], [tf.float64]
        )
        return tf.ensure_shape(found, [])

    placement = placement_of(model)
    assert placement is not None
    count_over_stages(model.trainable_variables, placement.owned, total)


def _refuse_float16(model: DistributedModel) -> None:
    """Refuse what needs a loss scale, of which each stage would have its own."""
    found = [x.name for x in model._flatten_layers() if x.compute_dtype == "float16"]
    if found:
        raise ModelError(
            f"layer {found[0]!r} computes in float16, which needs a loss scale, and each stage "
            "would lower it, and skip updates, by itself. Use mixed_bfloat16"
        )


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Have a function called once a model is cut, before its first forward pass.

    Args:
        hook: takes no arguments; runs eagerly, on every rank, once for each model.
    """
    _hooks.append(hook)
    return hook


def forget_models() -> None:
    """Forget the hooks, and where models are cut, at the end of the script."""
    _hooks.clear()
    forget_stages()


state.at_shutdown(forget_models)


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Put the layers that are created or called inside on stage `index`; the innermost wins.

    It has no effect with auto_partition, the default.

    Raises:
        ConfigError: there is no such stage.
    """
    settings = state.current().settings
    whole = isinstance(index, int) and not isinstance(index, bool)
    if not whole or not 0 <= index < settings.partitions:
        raise ConfigError(
            f"partition({index!r}): a stage is an integer from 0 to {settings.partitions - 1}, "
            f"since smp.init was given partitions={settings.partitions}"
        )
    if settings.auto_partition:
        yield
        return
    with on_stage(index):
        yield
