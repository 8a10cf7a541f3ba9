"""Build a model without values, then make those that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import keras
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from ktrainer.runtime.monkeypatching import replaced

# Keras' names for what it keeps for each thread.
_WAITING = "uninitialized_variables"
_SCOPE = "stateless_scope"

# What a model's building function has assigned to its variables, such as loaded weights.
_assigned: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def build_deferred(build: Callable[[], Any]) -> Any:
    """The model that `build` makes, its weights without values.

    Initial values depend on an initializer's own seed alone, so those made later, or in another
    process, are the ones that would have been made now. Variables that are made from a value,
    such as an optimizer's learning rate, have it at once.
    """
    with deferred() as scope:
        model = build()
    if not isinstance(model, keras.Model):
        return model  # the Trainer raises an error
    found = [(v, scope.get_current_value(v)) for v in model.variables]
    _assigned[model] = {id(v): value for v, value in found if value is not None}
    weights = {id(v) for v in model.variables}
    for variable in list(global_state.get_global_attribute(_WAITING) or []):
        if id(variable) not in weights and variable._value is None:
            _make(variable, {})  # a metric's states, for one
    _forget_waiting()
    return model


@contextmanager
def deferred() -> Iterator[Any]:
    """A scope in which variables are created without values."""
    original = keras.Variable.__init__

    def init(self: Any, initializer: Any, *args: Any, **kwargs: Any) -> None:
        # A value that is given needs no deferring, and Keras refuses it inside of the scope.
        with nullcontext() if callable(initializer) else _outside():
            original(self, initializer, *args, **kwargs)

    with (
        replaced(
            (keras.Variable, "__init__", init),
            # Optimizers know variables by their values otherwise; see `know_by_value`.
            (TFOptimizer, "_var_key", lambda self, variable: id(variable)),
        ),
        keras.StatelessScope(initialize_variables=False) as scope,
    ):
        yield scope


def know_by_value(optimizer: Any) -> None:
    """Let an optimizer that was built without values know its variables by the values that they
    have by now, which is what Keras hands to its update."""
    keys = {
        id(v): optimizer._var_key(v) for v in optimizer._trainable_variables if v._value is not None
    }
    places = optimizer._trainable_variables_indices
    optimizer._trainable_variables_indices = {
        keys.get(key, key): place for key, place in places.items()
    }
    excluded = getattr(optimizer, "_exclude_from_weight_decay", None)
    if excluded:
        optimizer._exclude_from_weight_decay = {keys.get(key, key) for key in excluded}


@contextmanager
def _outside() -> Iterator[None]:
    """Leave the stateless scope for a while."""
    scope = global_state.get_global_attribute(_SCOPE)
    global_state.set_global_attribute(_SCOPE, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_SCOPE, scope)


def make_values(model: Any, variables: Collection[Any]) -> None:
    """Make the values of those of `variables`, of `model` or its optimizer, that have none."""
    values = _assigned.pop(model, {})  # for once: they are as large as the model
    for variable in variables:
        if variable._value is None:
            _make(variable, values)
    _forget_waiting()


def _forget_waiting() -> None:
    """Keras makes all variables that wait for their values whenever a scope of its own ends."""
    global_state.set_global_attribute(_WAITING, [])


def _make(variable: Any, values: dict[int, Any]) -> None:
    variable._deferred_initialize()
    if id(variable) in values:
        variable.assign(values[id(variable)])
