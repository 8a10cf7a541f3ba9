"""Warnings of variables and random draws of updates that no checkpoint holds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from ktrainer.callbacks.base import overrides
from ktrainer.checkpoint.contents.capture_state import variables_here
from ktrainer.checkpoint.contents.plain_attributes import is_scalar_variable, is_users_own
from ktrainer.steps.named_variables import INTERNAL, inner_variable, variables_in, view_of
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.random_numbers import draws_by_count
from ktrainer.steps.variable_placement import placement_of

_DRAWS = "tf.random"
_MAX_BYTES = 1 << 16  # of variables whose values are compared
_checked: WeakSet[Any] = WeakSet()  # graphs
_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # names of variables, by model
# By model and id, variables that updates only read, and their values at the first checkpoint.
_read: WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = WeakKeyDictionary()


def warn_of_unsaved(model: Any, graphs: Iterable[Any], callbacks: Iterable[Any]) -> None:
    """Warn, once of each, of variables that updates assign and checkpoints do not hold; also of
    draws of `tf.random`.

    Args:
        graphs: of the compiled functions of an update. Of a model that is cut into stages what its
            loss and optimizers have is named, whether or not it is assigned.
        callbacks: those that have a `state_dict` keep their variables themselves.
    """
    if placement_of(model) is None:
        new = [graph for graph in graphs if graph not in _checked]
        _checked.update(new)
        with suppress(ValueError):  # TensorFlow writes no graph of more than 2 GB
            if any(map(draws_by_count, new)):
                _warn_of_draws(model)
        held = _held(model, callbacks) if new else set()
        found = [v for graph in new for v in _assigned(graph) if id(v) not in held]
        names = {_name_of(v) for v in found if INTERNAL not in v.name}
        what = "which updates assign, and no layer, loss or optimizer has among its attributes"
        remedy = "Make it an attribute of one"
        _warn(model, names, what, remedy)
        _note_read(model, new, held | {id(v) for v in found})
        names = {_name_of(v) for v, first in _read[model].values() if not _is(v, first)}
        what = "which updates read and the script changes"
        remedy = "Make it an attribute of a layer or, if it is a scalar, of a callback"
    else:
        optimizers = optimizers_of(model)
        weights = [*model.variables, *(v for each in optimizers for v in each.variables)]
        held = {id(v) for v in weights}  # an optimizer has a list of what it trains
        parts = (getattr(model, "loss", None), *optimizers)
        found = [v for part in parts for v in variables_in(part) if id(v) not in held]
        names = {_name_of(v) for v in found}
        what = "of the loss or an optimizer of a pipeline"
        remedy = "Make it with `add_weight(trainable=False)` in a layer"
    _warn(model, names, what, remedy)


def _warn(model: Any, names: set[str], what: str, remedy: str) -> None:
    warned = _warned.setdefault(model, set())
    for name in sorted(names - warned):
        warnings.warn(
            f"checkpoints do not hold the variable {name!r}, {what}: a run that resumes, and a "
            f"rank that joins, begin with its initial value. {remedy}, or save it in the "
            "`state_dict` of a callback",
            stacklevel=5,
        )
    warned |= names


def _note_read(model: Any, graphs: Iterable[Any], others: set[int]) -> None:
    """Note the values of variables that graphs read, but for `others`, by id."""
    noted = _read.setdefault(model, {})
    for variable in (v for graph in graphs for v in _variables_of(graph)):
        size = variable.dtype.size * (variable.shape.num_elements() or 0)
        if id(variable) not in others and INTERNAL not in variable.name and size <= _MAX_BYTES:
            noted.setdefault(id(variable), (variable, view_of(variable)))


def _is(variable: Any, value: Any) -> bool:
    return np.array_equal(view_of(variable), value, equal_nan=value.dtype.kind in "fc")


def _warn_of_draws(model: Any) -> None:
    warned = _warned.setdefault(model, set())
    if _DRAWS not in warned:
        warned.add(_DRAWS)
        warnings.warn(
            "updates draw random numbers with tf.random, and checkpoints do not hold how many: a "
            "run that resumes begins with those of the first update again. Draw with keras.random "
            "and a keras.random.SeedGenerator of a layer",
            stacklevel=4,
        )


def _name_of(variable: tf.Variable) -> str:
    """Its name, without the number of a replica."""
    return re.sub(r"/replica_\d+$", "", variable.name.partition(":")[0])


def _held(model: Any, callbacks: Iterable[Any]) -> set[int]:
    """Ids of the TensorFlow variables whose values checkpoints hold, or need not hold: means of a
    model's own metrics, and what recurrent layers remember."""
    held = [*(v for _, v in variables_here(model)), *model.metrics_variables]
    for name in ("_loss_tracker", "_compile_metrics", "_compile_loss"):
        held += list(getattr(getattr(model, name, None), "variables", ()))
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            held += keras.tree.flatten(getattr(layer, "states", None) or [])
    for callback in callbacks:
        if is_users_own(callback):
            held += [v for v in vars(callback).values() if is_scalar_variable(v)]
        if overrides(callback, "state_dict"):
            held += variables_in(vars(callback))
            models = [v for v in vars(callback).values() if isinstance(v, keras.Layer)]
            held += [v for each in models for v in each.variables]
            held += [v for v in vars(callback).values() if isinstance(v, keras.Variable)]
    found = [inner_variable(v) for v in held]
    found = [getattr(v, "_v", v) for v in found]  # of a tf.distribute strategy
    return {id(each) for v in found for each in (v, *getattr(v, "values", ()))}


def _assigned(graph: Any) -> list[tf.Variable]:
    """The variables from outside of a graph that it writes, also in functions that it calls."""
    written = set[int]()
    for operation in graph.get_operations():
        if any(tensor.dtype == tf.resource for tensor in operation.inputs):
            written |= {id(tensor) for tensor in get_read_write_resource_inputs(operation)[1]}
    handles = {id(outside) for outside, inside in graph.captures if id(inside) in written}
    return [v for v in _variables_of(graph) if id(v.handle) in handles]


def _variables_of(graph: Any) -> list[tf.Variable]:
    """The variables from outside of a graph that it uses."""
    try:
        return list(graph.variables)
    except AssertionError:  # one of them is gone, so it was no state
        return []
