"""Helpers around a Keras step: rows of its batch, averaged statistics, a check, its random seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from ktrainer.errors import ModelError
from ktrainer.steps.assigned_variables import AssignedVariables
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.variable_assignments import (
    aggregation_of,
    depends_on_batch,
    is_added_to,
    not_averaged,
)

STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


def has_own_steps(model: keras.Model) -> bool:
    """Return whether a model has a `train_step`, `test_step` or `predict_step` of its own."""
    return any(getattr(type(model), n) is not getattr(keras.Model, n) for n in STEPS.values())


def is_uniform(batch: Any) -> bool:
    """Return whether all dimensions but the first are static, in every tensor of `batch`."""
    return all(None not in tuple(t.shape)[1:] for t in keras.tree.flatten(batch) if t is not None)


def rows_of(batch: Any) -> int | tf.Tensor | None:
    """The rows of a batch, which may be padding; an int where their number is static."""
    for leaf in keras.tree.flatten(batch):
        shape: Any = getattr(leaf, "shape", ())
        if len(shape) > 0:
            return tf.shape(leaf, out_type=tf.int64)[0] if shape[0] is None else int(shape[0])
    return None


def local_output(output: Any) -> Any:
    """An output of `predict` as a NumPy array, or as the ragged tensor that it is."""
    return output if isinstance(output, tf.RaggedTensor) else np.asarray(output)


def check_applied(context: StepContext, model: keras.Model) -> None:
    """Refuse a step whose gradients were never seen: its ranks would drift apart unnoticed.

    Raises:
        ModelError: the step applied no optimizer although there are weights to train.
    """
    if context.collectives is not None and context.applies == 0 and model.trainable_variables:
        raise ModelError(
            f"{type(model).__name__}.train_step updates its weights without `optimizer.apply` or "
            "`apply_gradients`, so its gradients cannot be summed over ranks. Apply them through "
            "a Keras optimizer, or train with backend=local."
        )


def average_statistics(context: StepContext, model: keras.Model) -> None:
    """Average what the step assigned and no optimizer owns, such as BatchNorm's statistics, but for
    those of local layers."""
    if context.collectives is None:
        return
    moved = [
        v
        for v in model.non_trainable_variables
        if id(v) in context.assigned
        and id(v) not in context.local
        and tf.as_dtype(v.dtype).is_floating
        and aggregation_of(v) != "sum"  # see `summed_statistics`
    ]
    for group in context.groups(moved) if moved else []:
        values = [tf.convert_to_tensor(moved[i].value) for i in group]
        averages = context.collectives.reduce(
            values, context.weight, context.order, compressed=False
        )
        for i, value in zip(group, averages, strict=True):
            moved[i].assign(value)


def warn_of_weight(context: StepContext, variable: Any, value: Any) -> None:
    """Warn of a weight that a step of `fit` sets to what it computes from its part of the rows, as
    for the second gradient of sharpness-aware minimization."""
    several = context.collectives is not None or context.capture
    if context.sums or context.gathered or id(variable) in context.local:
        return
    if several and depends_on_batch(value, context.graph):
        warnings.warn(
            f"a step assigns to the weight {variable.path} what it computes from its rows, of "
            "which each rank, replica or accumulated batch has a part: training is not that of one "
            "process (replicas get the value of the first one). Let it use the rows of all ranks, "
            "as ktrainer.all_gather gives them",
            stacklevel=2,
        )


def warn_of_statistic(context: StepContext, variable: Any, value: Any) -> None:
    """Warn of a statistic that a step of `fit` computes from its part of the rows, and whose mean
    over ranks is not that of all rows: a largest value, a queue, a number of rows; an integer, to
    which the step adds, is not even averaged. Gathered rows are those of all."""
    several = context.collectives is not None and not context.sums and not context.gathered
    if not several or variable.trainable or id(variable) in context.local:
        return
    if variable.aggregation not in ("none", "mean"):
        return
    text = None
    if aggregation_of(variable) is None:
        if is_added_to(variable._value, value):
            text = (
                f"a layer or step adds to the integer {variable.path} what it computes from its "
                "rows, of which each rank or replica has a part: its value is that of one part"
            )
    elif (what := not_averaged(variable._value, value, context.graph)) is not None:
        text = (
            f"a layer or step sets {variable.path} to {what}, and ranks or replicas, which have a "
            "part of the rows each, average it. Let it use the rows of all of them, as "
            "ktrainer.all_gather gives them"
        )
    if text is not None and depends_on_batch(value, context.graph):
        warnings.warn(
            f"{text}. To add up what all of them add, make it with add_weight(..., "
            'trainable=False, aggregation="sum").',
            stacklevel=2,
        )


@contextmanager
def summed_statistics(context: StepContext, model: keras.Model) -> Iterator[None]:
    """Sum over ranks what the step, traced inside, adds to statistics with `aggregation="sum"`, but
    for those of local layers. States of metrics are summed later.

    Raises:
        ModelError: there are such in an accumulated update that XLA compiles.
    """
    apart = {*(id(v) for v in model.metrics_variables), *context.local}
    sums = {id(v) for v in model.non_trainable_variables if aggregation_of(v) == "sum"} - apart
    if context.collectives is None or not sums:
        yield
        return
    assigned = AssignedVariables(context, sums)
    with assigned.noted():
        yield
    if context.capture and sums & context.assigned.keys():  # XLA compiles it in one piece
        context.refuse_xla('it has a statistic with aggregation="sum"')
    assigned.reduce()


def moved_by_padding(model: keras.Model) -> list[Any]:
    """Variables that a step changes on this rank alone: metrics, and statistics of local layers."""
    local = local_variables(model)
    return [*model.metrics_variables, *(v for v in model.non_trainable_variables if id(v) in local)]


def statistics_of_own_rows(model: keras.Model) -> list[Any]:
    """Statistics that each rank moves by its own rows: all but those of layers that sum their
    moments over ranks, and those that are sums over ranks themselves."""
    of_all_ranks = {
        id(variable)
        for layer in model._flatten_layers()
        if getattr(layer, "synchronized", False)
        for variable in layer.variables
    }
    return [
        variable
        for variable in model.non_trainable_variables
        if tf.as_dtype(variable.dtype).is_floating
        and id(variable) not in of_all_ranks
        and aggregation_of(variable) != "sum"
    ]


@contextmanager
def unmoved(variables: Sequence[Any], assigned: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Restore variables at the end of the block.

    Args:
        assigned: those that the block has assigned, by `id()`; None: any may be.
    """
    kept = [(v, tf.identity(v)) for v in variables]
    yield
    for variable, value in kept:
        if assigned is None or id(variable) in assigned:
            variable.assign(value)


def python_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a user's `@tf.function`, whose trace would not see `keras_patches`."""
    return getattr(step, "python_function", step)


def global_seed() -> Any:
    """Keras' global seed generator, which layers without a seed draw from; made where there is
    none.

    Making it draws from Python's `random`, which is restored: a model that needs no such seed would
    else be followed by other initial weights than under `Model.fit`.
    """
    state = random.getstate()
    generator = global_seed_generator()
    random.setstate(state)
    return generator
