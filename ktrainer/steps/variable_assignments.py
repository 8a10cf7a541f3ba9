"""Assignments to variables: their methods, constants and aggregation while a step is traced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.ops.resource_variable_ops import (
    BaseResourceVariable,
    ResourceVariable,
)

from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import Replacement, replaced_in
from ktrainer.steps.graph_parts import outside_of, upstream

_WHOLE = ("assign", "assign_add", "assign_sub")
ADDING = (*_WHOLE[1:], "scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")
_METHODS = ("assign", "scatter", "batch_scatter", "_strided_slice_assign")  # how they begin
# See `is_added_to`: of their inputs one is added to, the first one is, and some may be.
_ADDITIONS = ("AddV2", "AddN", "BiasAdd")  # the last by Keras, of a matrix and a vector
_KEEPING = {
    *("Identity", "Cast", "Reshape", "EnsureShape", "StopGradient", "Sub"),
    *("TensorScatterAdd", "TensorScatterSub"),
}
_SHAPES = {"Shape", "Size"}
_PARTS = ("StridedSlice", "Slice", "GatherV2")
_COMBINING = {  # a variable's value with another one
    "Maximum": "the larger one of its value and of what it computes from its rows",
    "Minimum": "the smaller one of its value and of what it computes from its rows",
    "ConcatV2": "a part of its value, and a part that it computes from its rows",
}
_UNKNOWN = ("If", "StatelessIf", "While", "StatelessWhile")
_AGGREGATIONS = {"SUM": "sum", "MEAN": "mean"}  # by the names of tf.VariableAggregation


def assignments(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """A replacement of each method that assigns to a `tf.Variable`, made of the original."""
    return [
        (owner, name, make(getattr(owner, name)))
        for owner in (BaseResourceVariable, ResourceVariable)
        for name in list(vars(owner))
        if name.startswith(_METHODS)
    ]


def without_assignments(scope: object) -> AbstractContextManager[None]:
    """Context in which a step, traced in `scope`, assigns to no `tf.Variable`: it gets what it
    would have assigned. Keras' variables have a `StatelessScope` for that.

    Raises:
        ModelError: it assigns to a part of one.
    """

    def computing(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: Any, *values: Any, **named: Any) -> tf.Tensor:
            if original.__name__ not in _WHOLE:
                raise ModelError(
                    f"{original.__name__} assigns to a part of {variable.name}, and a step whose "
                    "batches are accumulated is computed twice. Assign the whole variable "
                    "(assign, assign_add, assign_sub), or set trainer.accumulate=1."
                )
            given = values[0] if values else named.get("value", named.get("delta"))
            value = tf.convert_to_tensor(given, variable.dtype)
            if original.__name__ == "assign":
                return value
            return variable + value if original.__name__ == "assign_add" else variable - value

        return assign

    return replaced_in(scope, assignments(computing))


def aggregation_of(variable: Any) -> str | None:
    """`sum` or `mean`, as ranks' values of an assigned variable are combined; None: left alone."""
    floating = tf.as_dtype(variable.dtype).is_floating
    if not isinstance(variable, keras.Variable):
        kind = _AGGREGATIONS.get(variable.aggregation.name)
    elif variable.aggregation == "none":
        kind = None if variable.trainable else "mean"
    else:
        kind = variable.aggregation if variable.aggregation in ("sum", "mean") else None
    return kind if floating or kind == "sum" else None


def assign_total(variable: Any, value: Any, is_first: bool) -> None:
    """Assign outside of replicas; integers in parts, one a replica, to the first part of all.

    TensorFlow divides a value by the number of parts, and would drop what remains.

    Args:
        variable: a `keras.Variable` or `tf.Variable`.
        is_first: whether this process has the first replica.
    """
    inner = variable._value if isinstance(variable, keras.Variable) else variable
    in_parts = isinstance(inner, SyncOnReadVariable)
    is_sum = in_parts and inner.aggregation == tf.VariableAggregation.SUM
    if not is_sum or not tf.as_dtype(inner.dtype).is_integer:
        variable.assign(value)
        return
    for part in inner.values:
        with tf.device(part.device):
            part.assign(value if is_first else tf.zeros_like(value))
        is_first = False


def is_added_to(variable: tf.Variable, value: tf.Tensor) -> bool:
    """Return whether a traced value is, or may be, that of `variable` plus others."""
    value = outside_of(value)
    if not tf.is_symbolic_tensor(value):
        return False
    kind, inputs = value.op.type, value.op.inputs
    if kind == "ReadVariableOp":
        return outside_of(inputs[0]) is variable.handle
    if kind in _ADDITIONS:
        return sum(is_added_to(variable, each) for each in inputs) == 1
    if kind == "SelectV2":
        return all(is_added_to(variable, each) for each in inputs[1:])
    return kind in _UNKNOWN or (kind in _KEEPING and is_added_to(variable, inputs[0]))


def not_averaged(variable: tf.Variable, value: tf.Tensor, graph: Any) -> str | None:
    """Describe an assigned value that averaging over ranks gets wrong, or return None.

    Args:
        graph: of the step.
    """
    value = _kept(value)
    if not tf.is_symbolic_tensor(value):
        return None
    kind, inputs = value.op.type, list(value.op.inputs)
    others = [t for t in inputs if not is_added_to(variable, _kept(t))]
    if kind in _COMBINING and len(others) < len(inputs):
        # A queue of means is a mean of queues.
        of_rows = [t for t in others if kind != "ConcatV2" or t.shape[:1] == [None]]
        if any(depends_on_batch(t, graph) for t in of_rows):
            return _COMBINING[kind]
    if kind == "AddV2":
        one, other = inputs
        added = other if is_added_to(variable, one) else one
        if is_added_to(variable, value) and _is_of_shapes(added):
            return "its value and a number of rows"
    return None


def _kept(value: tf.Tensor) -> tf.Tensor:
    """The value that a tensor is, or is a part of, in another type or shape."""
    value = outside_of(value)
    while tf.is_symbolic_tensor(value) and value.op.type in (*_KEEPING, *_PARTS):
        value = outside_of(value.op.inputs[0])
    return value


def _is_of_shapes(value: tf.Tensor) -> bool:
    """Whether a traced value follows from shapes, and from nothing else but constants."""
    ends = {*_SHAPES, "ReadVariableOp"}
    operations = [tensor.op for tensor in upstream([value], ends)]
    kinds = {op.type for op in operations if op.type in ends or not op.inputs}
    return bool(kinds & _SHAPES) and kinds <= {*_SHAPES, "Const"}


def depends_on_batch(value: Any, graph: Any) -> bool:
    """Return whether a traced value is computed from an argument of the step that `graph` is of."""
    found = upstream([value], {"ReadVariableOp"})
    return any(t.op.type == "Placeholder" and t.graph is graph for t in found)


def constant_of(value: Any) -> np.ndarray | None:
    """The constant that a traced step assigns, as `reset_state` does; None for other values, and in
    an eager step, where each value is known and may be computed."""
    if tf.executing_eagerly() or value is None or isinstance(value, (tf.Variable, keras.Variable)):
        return None
    tensor = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
    static: np.ndarray | None = tf.get_static_value(tensor)
    return static
