"""The variables of a model's state, by unique names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.context import context
from tensorflow.python.eager.execute import execute
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.variable_placement import placement_of


def unique_names(names: Sequence[str]) -> list[str]:
    """`names` with `#2`, `#3`, ... after repeated ones."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def built_optimizers(model: Any) -> list[Any]:
    """The optimizers that `model` holds; the compiled one is built if possible, because its slots
    are part of the state. Those of a model that is cut into stages are built by its backend, with
    slots only where their variables are."""
    main = getattr(model, "optimizer", None)
    if (
        placement_of(model) is None
        and main is not None
        and not main.built
        and model.built
        and model.trainable_variables
    ):
        main.build(model.trainable_variables)
    return list(optimizers_of(model))


def all_variables(model: Any) -> list[tuple[str, Any]]:
    """(unique name, variable) of all variables of a step but metrics: weights, statistics, seed
    generators, and the optimizers' slots, counters and learning rates.

    The same on every process, whether or not it holds the values (see `placement_of`).
    """
    names = [f"model/{v.path}" for v in model.variables]
    variables = list(model.variables)
    for i, optimizer in enumerate(built_optimizers(model)):
        # Not the path, which depends on the scope in which the optimizer was built.
        names += [f"optimizer/{i}/{k}:{v.name}" for k, v in enumerate(optimizer.variables)]
        variables += optimizer.variables
    return list(zip(unique_names(names), variables, strict=True))


def model_variables(model: Any) -> list[tuple[str, Any]]:
    """Those of `all_variables` whose values are in this process."""
    placement = placement_of(model)
    named = all_variables(model)
    return named if placement is None else [(n, v) for n, v in named if placement.holds(v)]


def view_of(variable: Any) -> np.ndarray:
    """The values of a variable, read-only and without a copy if they are in host memory
    (`variable.numpy()` copies). They do not change with the variable."""
    value = getattr(variable, "_value", variable)
    if type(value) is ResourceVariable:  # one operation, not three
        return np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    return np.asarray(tf.convert_to_tensor(variable))


def views_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """`view_of` of each; variables on one device are read in one operation, as starting an
    operation takes longer than copying a scalar."""
    values = [getattr(variable, "_value", variable) for variable in variables]
    plain = all(type(value) is ResourceVariable for value in values)
    if not plain or len({value.device for value in values}) != 1:
        return [view_of(variable) for variable in variables]
    dtypes = [value.dtype.as_datatype_enum for value in values]
    attributes = ("N", len(values), "dtypes", dtypes)
    handles = [value.handle for value in values]
    read = execute(b"_ReadVariablesOp", len(values), handles, attributes, context())
    return [np.asarray(tensor) for tensor in read]
