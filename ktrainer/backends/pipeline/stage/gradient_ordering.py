"""Compute large gradients one at a time, to save memory.

TensorFlow runs all ops of a backward pass that are ready. Several gradients of large weights, and
copies of such weights that its kernels make, would then be in memory at a time, beside the sums
that they are added to. Here each large gradient is added up before the ops that compute the next
one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_LEAST_BYTES = 2**20
_LEAST_PART = 64  # of all gradients: one that is smaller does not matter


class GradientOrdering:
    """Orders the computation of gradients in a graph that is being traced.

    Args:
        gradients: dense ones, of static shapes.

    Attributes:
        order: positions in `gradients`, in the order of computation.
    """

    def __init__(self, gradients: Sequence[tf.Tensor]) -> None:
        graph = tf.compat.v1.get_default_graph()
        made = {op: place for place, op in enumerate(graph.get_operations())}
        self.order = sorted(range(len(gradients)), key=lambda k: made[_maker(gradients[k])])
        self._least = max(_LEAST_BYTES, sum(map(_bytes, gradients)) / _LEAST_PART)
        # Stateful ops run in the order in which they were traced, which must not be reversed.
        self._off = any(op.op_def and op.op_def.is_stateful for op in graph.get_operations())
        self._done: set[tf.Operation] = set()
        self._before: list[tf.Operation] = []

    def begin(self, gradient: tf.Tensor) -> None:
        """Let the ops of this gradient alone wait for the gradient before."""
        if self._off or not self._is_large(gradient):
            return
        # None of these is needed for an earlier gradient, so there is no cycle.
        for op in self._new(gradient):
            if self._before and any(map(self._is_large, (*op.inputs, *op.outputs))):
                op._add_control_inputs(self._before)

    def end(self, gradient: tf.Tensor, added: tf.Operation) -> None:
        """Note that the gradient is added by `added`."""
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


class UpdateOrdering:
    """Orders the updates of an optimizer in a graph that is being traced: one variable at a time.

    All at once, intermediate results would need as much memory as the slots.
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
    """The op that computes a gradient, before it is weighted or reshaped: these are traced in the
    order of the backward pass."""
    op = gradient.op
    while op.type in ("Cast", "Identity", "MulNoNan", "Reshape"):
        op = op.inputs[0].op
    return op


def _bytes(tensor: Any) -> int:
    """The size of a tensor of numbers whose shape is static; 0 for others."""
    return (tensor.shape.num_elements() or 0) * tensor.dtype.size
