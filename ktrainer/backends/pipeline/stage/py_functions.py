"""Differentiated Python functions (`tf.py_function`) inside a stage.

TensorFlow keeps one tape per op of such a function: that of its last run, which its gradient uses
up. With several microbatches in flight the last run belongs to another one, so the function has to
run right before its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.ops import script_ops

from ktrainer.backends.pipeline.schedules.actions import Action
from ktrainer.errors import ModelError
from ktrainer.steps.graph_parts import called_functions, functions_with

_OP = "EagerPyFunc"


class Differentiates(Protocol):
    """A compiled stage."""

    @property
    def python_gradient(self) -> str | None:
        """Name of an op that needs the tape of the last forward pass, or None."""


class PythonFunctions:
    """Ops of a graph that run Python functions, or their gradients.

    Args:
        definition: of a graph, with the functions that it calls, as a `GraphDef`.
    """

    def __init__(self, definition: Any) -> None:
        self._differentiated: list[str] = []
        self._gradients: list[str] = []
        bodies = [function.node_def for function in definition.library.function]
        every = itertools.chain(definition.node, *bodies)
        if not any(node.op == _OP for node in every):
            return
        self._differentiated = holding(definition, _is_differentiated)
        self._gradients = holding(definition, _is_gradient)

    def differentiated(self, ops: Collection[str]) -> list[str]:
        """Those of `ops` that run a function of which there is a gradient."""
        return [name for name in self._differentiated if name in ops]

    def gradients(self, ops: Collection[str]) -> list[str]:
        """Those of `ops` that run the gradient of one."""
        return [name for name in self._gradients if name in ops]


def check_order(row: Sequence[Action], stage_of: Callable[[Action], Differentiates]) -> None:
    """Refuse a rank's part of a schedule in which another forward pass comes before the gradient
    of a Python function.

    Raises:
        ModelError: naming the function's op.
    """
    waiting: set[int] = set()
    for action in row:
        stage = stage_of(action)
        if stage.python_gradient is None:
            continue
        if action.kind == "F" and id(stage) in waiting:
            raise ModelError(
                f"a tf.py_function is differentiated ({stage.python_gradient}), which works for "
                "one microbatch at a time: set backend.recompute=true, or stop its gradient with "
                "keras.ops.stop_gradient"
            )
        if action.kind == "F":
            waiting.add(id(stage))
        elif action.kind != "W":  # it runs in the first half, where there are two
            waiting.discard(id(stage))


def holding(definition: Any, wanted: Callable[[Any], bool]) -> list[str]:
    """Names of the nodes that are `wanted`, or call functions with such nodes, however deep."""
    found = functions_with(definition.library, wanted)
    return [n.name for n in definition.node if wanted(n) or called_functions(n) & found]


def _is_gradient(node: Any) -> bool:
    function = _function(node)
    return function is not None and function._is_grad_func


def _is_differentiated(node: Any) -> bool:
    function = _function(node)
    return function is not None and function._support_graph_mode_gradient


def _function(node: Any) -> Any:
    """TensorFlow's record of the Python function that a node runs, or None."""
    if node.op != _OP:
        return None
    return script_ops._py_funcs.get(tf.compat.as_str(node.attr["token"].s))
