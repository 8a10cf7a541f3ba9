"""Keras models that are cut into stages at their first call inside of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from ktrainer.backends.pipeline.graph.stage_scopes import partition as on_stage
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.checkpoint.export.keras_file import write_file, write_keras_file
from ktrainer.config import PipelineConfig
from ktrainer.errors import CheckpointError, ConfigError, ModelError
from ktrainer.modelparallel import coroutines, state
from ktrainer.modelparallel.global_norm import count_over_stages, forget_stages
from ktrainer.modelparallel.model_call import RUNNER, run_through_stages
from ktrainer.steps.variable_placement import placement_of

_hooks: list[Callable[[], Any]] = []


class DistributedModel(keras.Model):
    """A model that is cut into stages, one in each process of a replica.

    Subclass it as `keras.Model`. It is called inside of a function decorated with `step` alone,
    once in it; its outputs reach every process of the replica. From the first call on
    `trainable_variables` are those that this process holds.
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
        training = bool(kwargs.pop("training", False))
        if len(args) != 1 or kwargs:
            raise ModelError(
                f"model {self.name!r} was called with {len(args)} positional arguments and "
                f"{sorted(kwargs)}: a DistributedModel takes one, which may be nested (a tuple or "
                "a dict of tensors), and training=True or False"
            )
        return run_through_stages(body, self, args[0], training)

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
        """Losses that layers have added or that weights have, before the model is cut.

        Raises:
            ModelError: the model is cut, and has some: no process has all of them.
        """
        if placement_of(self) is None:
            return cast("list[Any]", super().losses)
        added = [x for x in self._flatten_layers() if getattr(x, "activity_regularizer", None)]
        added += [x for x in self._flatten_layers() if x._get_own_losses()]
        if added or any(v.regularizer is not None for v in self.variables):
            raise ModelError(
                f"model {self.name!r} is cut into stages, and losses that layers add, or that "
                "weights have (regularizers), are in different processes: compute the loss from "
                "the outputs of the model, and use weight_decay of the optimizer"
            )
        return []


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
    config = pipeline_config(now.settings)
    rows = next((x.shape[0] for x in keras.tree.flatten(inputs)), None) or 1
    planned = PlannedModel(
        model, config, rows * config.microbatches, 1, now.layout, now.world, (now.mp, now.dp), False
    )
    with tf.init_scope():
        planned.place((inputs,))
        _refuse_shared(planned)
        _refuse_empty(planned)
        _refuse_float16(model)
        count_over_stages(model.trainable_variables, now.mp)
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


def _refuse_shared(planned: PlannedModel) -> None:
    """Refuse variables that change on several stages: each would have a part of the change."""
    for variable in planned.model.variables:
        holders = planned.holders[id(variable)]
        if len(holders) > 1 and tf.as_dtype(variable.dtype).is_floating:
            raise ModelError(
                f"{variable.path!r} is used on stages {holders}: its gradients, or its statistics, "
                "would be parts that no process has all of. Put all calls of its layer on one "
                "stage, with auto_partition=False and `with smp.partition(i):`"
            )


def _refuse_float16(model: DistributedModel) -> None:
    """Refuse what needs a loss scale, of which each stage would have its own."""
    found = [x.name for x in model._flatten_layers() if x.compute_dtype == "float16"]
    if found:
        raise ModelError(
            f"layer {found[0]!r} computes in float16, which needs a loss scale, and each stage "
            "would lower it, and skip updates, by itself. Use mixed_bfloat16"
        )


def _refuse_empty(planned: PlannedModel) -> None:
    """Refuse a stage without a trained variable: its loop would ask for no gradient, and those
    before it would wait for one."""
    trained = {h for v in planned.compiled_for[1] for h in planned.holders[id(v)]}
    empty = [k for k in range(planned.config.partitions) if k not in trained]
    if empty and trained:
        raise ModelError(
            f"stages {empty} of model {planned.model.name!r} have no trained variables: use fewer "
            "partitions, or put layers with weights on them, with auto_partition=False and `with "
            "smp.partition(i):`"
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
