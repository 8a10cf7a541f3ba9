"""Build a model without values, then make those that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced

# Keras' names for what it keeps for each thread.
_WAITING = "uninitialized_variables"
_SCOPE = "stateless_scope"
_TRAINS = (
    "the function that builds the model also trains or evaluates it, but under a pipeline its "
    "weights get their values later, each in the process of its stage: there the function only "
    "builds and loads. Train before, and pass the model, or a function that loads it."
)

# What a model's building function has assigned to variables that have no values yet, such as loaded
# weights.
_assigned: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


class _Scope(keras.StatelessScope):
    """Also remembers the variables that were assigned."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self._updated: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self._updated[id(update[0])] = update[0]

    @property
    def updates(self) -> list[tuple[Any, Any]]:
        """Each variable that was assigned, and its value."""
        return [(v, self.get_current_value(v)) for v in self._updated.values()]


def build_deferred(build: Callable[[], Any]) -> Any:
    """The model that `build` makes, its weights and its optimizer's slots without values.

    Initial values depend on an initializer's own seed alone, so those made later, or in another
    process, are the ones that would have been made now. Variables that are made from a value,
    such as an optimizer's learning rate, have it at once, and what `build` assigned to them.

    Raises:
        ModelError: `build` trains or evaluates.
    """
    with deferred() as scope:
        model = _built(build, scope)
    every, deferrable = scope.updates, {id(v) for v in _placed_variables(model)}
    if any(tf.is_symbolic_tensor(x) and id(v) in deferrable for v, x in every):
        raise ModelError(_TRAINS)
    # Others are seeds that functions drew from while they were traced.
    updates = [(v, x) for v, x in every if not tf.is_symbolic_tensor(x)]
    _assign_now(updates, deferrable)
    if isinstance(model, keras.Model):  # else the Trainer raises an error
        _assigned[model] = {id(v): value for v, value in updates if v._value is None}
    return model


def _built(build: Callable[[], Any], scope: _Scope) -> Any:
    try:
        return build()
    except Exception as error:
        # A compiled step has assigned its tensors, or a gradient found weights without values.
        no_values = isinstance(error, AttributeError) and error.name == "handle"
        if no_values or any(tf.is_symbolic_tensor(value) for _, value in scope.updates):
            raise ModelError(_TRAINS) from error
        raise


def _placed_variables(model: Any) -> list[Any]:
    """The variables that `make_values` makes, where they are held."""
    if not isinstance(model, keras.Model):
        return []
    return [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ())]


def _assign_now(updates: list[tuple[Any, Any]], deferred: Collection[int]) -> None:
    """Assign to variables that have values, and make the others but for those in `deferred`."""
    for variable, value in updates:
        if variable._value is not None:
            variable.assign(value)
    values = {id(v): value for v, value in updates}
    for variable in list(global_state.get_global_attribute(_WAITING) or []):
        if id(variable) not in deferred and variable._value is None:
            _make(variable, values)  # a metric's states, for one
    _forget_waiting()


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
            # TensorFlow's would make the value of the weight, to put the slot on its device.
            (TFOptimizer, "add_variable_from_reference", BaseOptimizer.add_variable_from_reference),
        ),
        _Scope() as scope,
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
