"""Hooks on Keras' creation and calls of operations, installed while there is a watcher.

Keras has no events for this, so functions are replaced while the first watcher is there
and restored when the last one leaves:

| replaced | because |
|---|---|
| `Operation.__new__` | a layer or op is created, also as part of another one |
| `Node.__init__` | every call on symbolic tensors, of a layer or of an op, is recorded here |
| `Layer.symbolic_call` | here a layer decides to be one node, whatever its `call` does |
| `Layer.add_loss`, `Variable.assign`, those of `tf.Variable` | side effects, that no node shows |

Watchers belong to the context that entered them: other threads run as if there were none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import keras
from keras.src.ops.node import Node

from ktrainer.runtime.monkeypatching import Replacements
from ktrainer.steps.variable_assignments import assignments


class Watcher:
    """Base class of watchers; the defaults do nothing."""

    def created(self, operation: Any) -> None:
        """An operation or layer was created; its `__init__` has not run yet."""

    def called(self, node: Any) -> None:
        """An operation or layer was called on symbolic tensors."""

    def changing(self, owner: Any) -> None:
        """A loss is about to be added to a layer, or a value assigned to a variable: `owner`."""

    def symbolic_call(
        self, layer: Any, proceed: Callable[[], Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """The symbolic outputs of a layer; `proceed()` gives those that Keras would make."""
        return proceed()


_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("ktrainer_watchers", default=())
_lock = threading.Lock()
_replaced = Replacements()
_users = 0


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` on events of Keras inside the block, before watchers entered earlier."""
    _enter()
    token = _watchers.set((watcher, *_watchers.get()))
    try:
        yield
    finally:
        _watchers.reset(token)
        _leave()


def installed() -> bool:
    """Return whether there is a watcher, in any thread."""
    return _users > 0


def _enter() -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _replaced.wrap(keras.Operation, "__new__", _new)
            _replaced.wrap(Node, "__init__", _node)
            _replaced.wrap(keras.layers.Layer, "symbolic_call", _symbolic_call)
            _replaced.wrap(keras.layers.Layer, "add_loss", _changing)
            _replaced.wrap(keras.Variable, "assign", _changing)
            for replacement in assignments(_changing):
                _replaced.set(*replacement)


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _replaced.close()


def _new(original: Callable[..., Any]) -> Any:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        operation = original(cls, *args, **kwargs)
        for watcher in _watchers.get():
            watcher.created(operation)
        return operation

    return staticmethod(new)


def _node(original: Callable[..., Any]) -> Any:
    def init(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        for watcher in _watchers.get():
            watcher.called(node)

    return init


def _changing(original: Callable[..., Any]) -> Any:
    @wraps(original, updated=())  # TensorFlow's notes are of the original alone
    def change(owner: Any, *args: Any, **kwargs: Any) -> Any:
        for watcher in _watchers.get():
            watcher.changing(owner)
        return original(owner, *args, **kwargs)

    return change


def _symbolic_call(original: Callable[..., Any]) -> Any:
    def symbolic_call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        proceed = partial(original, layer, *args, **kwargs)
        for watcher in _watchers.get():
            proceed = partial(watcher.symbolic_call, layer, proceed, args, kwargs)
        return proceed()

    return symbolic_call
