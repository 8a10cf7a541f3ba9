"""One large gradient at a time.

TensorFlow runs all ops of a backward pass that are ready. Gradients of large weights, and copies
of such weights that its kernels make, would then lie in memory several at a time, beside the sums
that they are added to. A stage is short of memory and busy with several microbatches, so here each
large gradient is added up before the backward pass goes on to what makes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LEAST_BYTES = 2**20
_LEAST_PART = 64  # of all gradients: one that is smaller does not matter


class Turns:
    """Orders the making of gradients in a graph that is being traced.

    Args:
        gradients: dense ones, of static shapes.

    Attributes:
        order: places in `gradients`, in the order in which they are made.
    """

    def __init__(self, gradients: Sequence[tf.Tensor]) -> None:
        graph = tf.compat.v1.get_default_graph()
        made = {op: place for place, op in enumerate(graph.get_operations())}
        self.order = sorted(range(len(gradients)), key=lambda k: made[_maker(gradients[k])])
        self._least = max(_LEAST_BYTES, sum(map(_bytes, gradients)) / _LEAST_PART)
        # Stateful ops run in the order in which they were traced, which must not be turned around.
        self._off = any(op.op_def and op.op_def.is_stateful for op in graph.get_operations())
        self._done: set[tf.Operation] = set()
        self._before: list[tf.Operation] = []

    def begin(self, gradient: tf.Tensor) -> None:
        """Let what makes this gradient, and nothing before it, wait for the gradient before."""
        if self._off or not self._is_large(gradient):
            return
        # None of these is needed for an earlier gradient, so that no circle can come about.
        for op in self._new(gradient):
            if self._before and any(map(self._is_large, (*op.inputs, *op.outputs))):
                op._add_control_inputs(self._before)

    def end(self, gradient: tf.Tensor, added: tf.Operation) -> None:
        """The gradient has been added by `added`."""
        if self._is_large(gradient):
            self._done.add(added)
            self._before = [added]

    def _new(self, gradient: tf.Tensor) -> list[tf.Operation]:
        """The ops that are needed for a gradient, and for none of the large ones before it."""
        found, waiting = [], [gradient.op]
        while waiting:
            op = waiting.pop()
            if op not in self._done and op.type != "Placeholder":
                self._done.add(op)
                found.append(op)
                waiting += [x.op for x in op.inputs] + list(op.control_inputs)
        return found

    def _is_large(self, tensor: Any) -> bool:
        return _bytes(tensor) >= self._least


class InTurn:
    """Orders what an optimizer does in a graph that is being traced, as one variable is updated
    after the other: all at once, the results on the way would need as much memory as its slots.
    """

    def __init__(self) -> None:
        self._last: tf.Operation | None = None

    def __call__(self, update: Callable[[], None]) -> None:
        """Run `update` after the updates before, one of its assignments after the other."""
        graph = tf.compat.v1.get_default_graph()
        if self._last is not None and self._last.graph is not graph:
            self._last = None
        start = len(graph.get_operations())
        with tf.control_dependencies([self._last] if self._last is not None else []):
            update()
        last = None
        for op in graph.get_operations()[start:]:
            if last is not None and op.inputs:
                op._add_control_inputs([last])
            if op.type.startswith("Assign"):
                self._last = last = op


def _maker(gradient: tf.Tensor) -> tf.Operation:
    """The op that a gradient comes from, before it was weighted or brought into its shape: these
    are traced in the order of the backward pass."""
    op = gradient.op
    while op.type in ("Cast", "Identity", "MulNoNan", "Reshape"):
        op = op.inputs[0].op
    return op


def _bytes(tensor: Any) -> int:
    """The size of a tensor of numbers whose shape is static; 0 for others."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
