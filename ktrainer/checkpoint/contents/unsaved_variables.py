"""Variables that updates assign, but that no checkpoint holds and no joining rank gets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import tensorflow as tf
from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs

from ktrainer.callbacks.base import overrides
from ktrainer.checkpoint.contents.capture_state import variables_here
from ktrainer.steps.named_variables import OWN, variables_in
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.variable_placement import placement_of

_looked_at: WeakSet[Any] = WeakSet()  # graphs
_named: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by model


def warn_of_unsaved(model: Any, graphs: Iterable[Any], callbacks: Iterable[Any]) -> None:
    """Warn of variables that a resumed run would begin with as the script makes them; of each once.

    Args:
        graphs: of the compiled functions of an update. Of a model that is cut into stages what its
            loss and optimizers have is named, whether or not it is assigned.
        callbacks: those that keep a state of their own keep their variables, too.
    """
    new = [graph for graph in graphs if graph not in _looked_at]
    _looked_at.update(new)
    if placement_of(model) is None:
        held = _held(model, callbacks)
        found = [v for graph in new for v in _assigned(graph) if id(v) not in held]
        names = {v.name for v in found if OWN not in v.name}
        what = (
            "which updates assign, but which is no attribute of a layer, the loss or an optimizer"
        )
        remedy = "Make it one"
    else:
        parts = (getattr(model, "loss", None), *optimizers_of(model))
        names = {v.name for part in parts for v in variables_in(part)}
        what = "of the loss or an optimizer of a pipeline"
        remedy = "Make it with `add_weight(trainable=False)` in a layer"
    named = _named.setdefault(model, set())
    for name in sorted(names - named):
        warnings.warn(
            f"checkpoints do not hold the variable {name.partition(':')[0]!r}, {what}: a run that "
            f"resumes, and a rank that joins, begin with its initial value. {remedy}, or save it "
            "in the `state_dict` of a callback",
            stacklevel=4,
        )
    named |= names


def _held(model: Any, callbacks: Iterable[Any]) -> set[int]:
    """Ids of the TensorFlow variables whose values checkpoints hold."""
    held = [*(v for _, v in variables_here(model)), *model.metrics_variables]
    for callback in callbacks:
        if overrides(callback, "state_dict"):
            held += variables_in(vars(callback))
    values = [getattr(v, "_value", getattr(v, "variable", v)) for v in held]
    parts = [part for value in values for part in getattr(value, "values", ())]
    return {id(each) for each in (*values, *parts)}


def _assigned(graph: Any) -> list[tf.Variable]:
    """The variables from outside of a graph that it writes, also in functions that it calls."""
    written = set[int]()
    for operation in graph.get_operations():
        if any(tensor.dtype == tf.resource for tensor in operation.inputs):
            written |= {id(tensor) for tensor in get_read_write_resource_inputs(operation)[1]}
    handles = {id(outside) for outside, inside in graph.captures if id(inside) in written}
    return [v for v in graph.variables if id(v.handle) in handles]
