"""Undo what a pass changes, in Keras' variables and besides.

Restored are TensorFlow variables, wherever they are held, and what can be reached from a model's
own attributes: numbers, lists, dicts, sets, arrays and plain objects. Globals are not.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import core as tf_core
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from ktrainer.distributed import World
from ktrainer.runtime.monkeypatching import entered_in_this_thread, replaced_in

PLAIN = (bool, int, float, str, bytes, type(None))
_MOST_VISITED, _MOST_BYTES = 10_000, 64 * 2**20
_COLLECTIVES = ("barrier", "broadcast", "allgather", "oob_allreduce", "allreduce", "any")
_OTHERS = {*sys.stdlib_module_names, "keras", "ktrainer", "numpy", "tensorflow", "torch"}


class CheckSkipped(Exception):
    """Why a model is not checked."""


class KeptState:
    """Python state of a model's layers as it is now.

    Raises:
        CheckSkipped: it is too large to be kept.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        own = _attributes_of_keras()
        self._attributes = [dict(vars(layer)) for layer in self._layers]
        self._kept: dict[int, tuple[str, Any, Any]] = {}
        self._visited = 0
        for layer, attributes in zip(self._layers, self._attributes, strict=True):
            if not _is_of_others(layer):
                for name, value in attributes.items():
                    if name not in own:
                        self._keep(f"{layer.name}.{name}", value)
        self._own = own

    def restore(self) -> tuple[list[str], list[str]]:
        """Put everything back; the names of attributes, and of containers, that had changed."""
        attributes: list[str] = []
        for layer, before in zip(self._layers, self._attributes, strict=True):
            attributes += [
                f"{layer.name}.{name}" for name in self._restore_attributes(layer, before)
            ]
        containers = []
        for name, thing, before in self._kept.values():
            if not _is_as_before(thing, before):
                containers.append(name)
                _put_back(thing, before)
        return attributes, containers

    def _restore_attributes(self, layer: Any, before: dict[str, Any]) -> Iterator[str]:
        now, of_others = vars(layer), _is_of_others(layer)
        for name, value in before.items():
            if name in ("_called", "built") or now.get(name) is value:
                continue
            plain = isinstance(value, PLAIN)
            if plain and type(now.get(name)) is type(value) and now[name] == value:
                continue
            if plain or not (of_others or name in self._own):
                yield name
                now[name] = value
        for name in [] if of_others else set(now) - set(before) - self._own:
            if not isinstance(now[name], (keras.layers.Layer, keras.Variable, tf.Variable)):
                yield name
                del now[name]

    def _keep(self, name: str, thing: Any) -> None:
        if isinstance(thing, PLAIN) or id(thing) in self._kept or self._visited > _MOST_VISITED:
            return
        self._visited += 1
        inside: Any = ()
        if isinstance(thing, np.ndarray):
            if thing.nbytes > _MOST_BYTES:
                raise CheckSkipped(f"{name} is an array of {thing.nbytes / 2**20:.0f} MiB")
            self._kept[id(thing)] = name, thing, thing.copy()
        elif isinstance(thing, dict):
            self._kept[id(thing)] = name, thing, dict(thing)
            inside = thing.items()
        elif isinstance(thing, (list, deque, set)):
            self._kept[id(thing)] = name, thing, list(thing)
            inside = enumerate(thing)
        elif isinstance(thing, tuple):
            inside = enumerate(thing)
        elif hasattr(thing, "__dict__") and not _is_of_others(thing) and not _is_known(thing):
            self._keep(name, vars(thing))
        for key, value in inside:
            self._keep(f"{name}[{key!r}]", value)


@contextmanager
def variables_kept(changed: list[str], copies: Container[int]) -> Iterator[None]:
    """Restore, after the block, all TensorFlow variables that this thread assigns inside.

    Args:
        changed: to which the names of those that had changed are added.
        copies: ids of variables that exist within the block only, for what it assigns to others.
    """
    kept: dict[int, tuple[Any, Any]] = {}

    def keeping(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
        if id(self) not in kept:
            with tf.init_scope():  # where a step is traced, too
                kept[id(self)] = self, tf.identity(self)
        return original(self, *args, **named)

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **named: keeping(original, self, *args, **named)

    replaced = [
        (cls, name, replacement(original))
        for cls in (BaseResourceVariable, ResourceVariable)
        for name, original in vars(cls).items()
        if name.startswith(("assign", "scatter", "batch_scatter", "_strided_slice_assign"))
    ]
    try:
        with entered_in_this_thread(kept), replaced_in(kept, replaced):
            yield
    finally:
        for variable, value in kept.values():
            if id(variable) in copies:
                continue
            if not bool(tf.reduce_all(tf.equal(variable, value))):
                unnamed = variable.name.startswith("Variable:")  # TensorFlow's default
                shape = f"a tf.Variable of shape {tuple(variable.shape)}"
                changed.append(shape if unnamed else variable.name)
                variable.assign(value)


class Untouched:
    """Sends what is assigned to Keras variables inside the block to copies, and restores what else
    the model changes.

    Raises:
        CheckSkipped: on leaving, if a list or the like has changed, which may be more than that.

    Attributes:
        changed: names of the attributes that had to be restored.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.changed: list[str] = []
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._copies: set[int] = set()
        self._replaced = ExitStack()

    def __enter__(self) -> Untouched:
        self._states = random.getstate(), np.random.get_state()
        self._state = KeptState(list(self.model._flatten_layers(include_self=True)))
        for variable in self.model.variables:
            # Outside of its strategy's replicas, such a variable cannot be differentiated by.
            if getattr(variable._value, "_distribute_strategy", None) is not None:
                self._copy(variable)
        original, copy = tf_core.Variable._direct_assign, self._copy

        def direct_assign(variable: Any, value: Any) -> Any:
            copy(variable)
            return original(variable, value)

        self._replaced.enter_context(variables_kept(self.changed, self._copies))
        self._replaced.enter_context(entered_in_this_thread(self))
        replaced = [(tf_core.Variable, "_direct_assign", direct_assign)]
        self._replaced.enter_context(replaced_in(self, replaced))
        return self

    def __exit__(self, *error: object) -> None:
        self._replaced.close()
        for variable, value in self._kept.values():
            variable._value = value
        attributes, containers = self._state.restore()
        self.changed += attributes
        self.model._clear_losses()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        if containers:
            raise CheckSkipped(f"its step changes {', '.join(containers[:3])}")

    def _copy(self, variable: Any) -> None:
        if id(variable) in self._kept or variable._value is None:
            return
        value = variable._value
        self._kept[id(variable)] = variable, value
        with tf.init_scope():  # where a step is traced, too
            variable._value = tf.Variable(
                value.numpy(), dtype=value.dtype, trainable=variable.trainable
            )
        self._copies.add(id(variable._value))


@contextmanager
def no_communication(world: World) -> Iterator[None]:
    """Let collectives that this thread calls inside the block raise `CheckSkipped`: no other rank
    takes part."""

    def refuse(name: str, *_: Any, **__: Any) -> Any:
        raise CheckSkipped(f"its step communicates with other ranks ({name})")

    replaced = [(type(world), name, partial(refuse, name)) for name in _COLLECTIVES]
    with entered_in_this_thread(world), replaced_in(world, replaced):
        yield


def _attributes_of_keras() -> set[str]:
    # Named, as a number in Keras' own name would be missing in the names of later models.
    return {*vars(keras.Model(name="attributes")), *vars(keras.layers.Layer(name="attributes"))}


def _is_of_others(thing: Any) -> bool:
    """Whether a class is not the user's: such objects keep no count of steps."""
    return type(thing).__module__.partition(".")[0] in _OTHERS - {"__main__"}


def _is_known(thing: Any) -> bool:
    """Whether Keras or TensorFlow look after it, or it is no object with a state."""
    known = (keras.layers.Layer, keras.Variable, keras.Metric, keras.optimizers.Optimizer)
    return isinstance(thing, (*known, tf.Module, type)) or callable(thing)


def _is_as_before(thing: Any, before: Any) -> bool:
    if isinstance(thing, np.ndarray):
        return bool(np.array_equal(thing, before, equal_nan=thing.dtype.kind in "fc"))
    if isinstance(thing, dict):
        pairs = zip(thing.items(), before.items(), strict=False)
        same = all(a is c and _is_same(b, d) for (a, b), (c, d) in pairs)
    else:
        same = all(_is_same(a, b) for a, b in zip(thing, before, strict=False))
    return len(thing) == len(before) and same


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)


def _put_back(thing: Any, before: Any) -> None:
    # Not by methods of its own class, in which Keras keeps account of layers and variables.
    if isinstance(thing, np.ndarray):
        thing[...] = before
    elif isinstance(thing, list):
        list.__setitem__(thing, slice(None), before)
    else:
        kind: Any = next(kind for kind in (dict, deque, set) if isinstance(thing, kind))
        kind.clear(thing)
        (kind.extend if kind is deque else kind.update)(thing, before)
