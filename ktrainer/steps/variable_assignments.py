"""Assignments to variables while a step is traced: their methods, constants, and aggregation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import (
    BaseResourceVariable,
    ResourceVariable,
)

from ktrainer.runtime.monkeypatching import Replacement, replaced_in

_METHODS = ("assign", "assign_add", "assign_sub")
_AGGREGATIONS = {"SUM": "sum", "MEAN": "mean"}  # by the names of tf.VariableAggregation


def assignments(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Replacement]:
    """A replacement of each method that assigns to a `tf.Variable`, made of the original."""
    return [
        (owner, name, make(getattr(owner, name)))
        for owner in (BaseResourceVariable, ResourceVariable)
        for name in _METHODS
        if name in vars(owner)
    ]


def without_assignments(scope: object) -> AbstractContextManager[None]:
    """Context in which a step, traced in `scope`, assigns to no `tf.Variable`: it gets what it
    would have assigned. Keras' variables have a `StatelessScope` for that."""

    def computing(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: Any, *values: Any, **named: Any) -> tf.Tensor:
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


def constant_of(value: Any) -> np.ndarray | None:
    """The constant that a traced step assigns, as `reset_state` does; None for other values."""
    if not tf.is_tensor(value) or not tf.is_symbolic_tensor(value):
        return None
    static: np.ndarray | None = tf.get_static_value(value)
    return static
