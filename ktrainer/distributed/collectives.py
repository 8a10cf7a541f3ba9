"""Abstract collectives on gradients: sums of tensors over ranks, inside a compiled step.

All sums of gradients over replicas go through here; host messages go out of band through `World`.
Two operations are enough for data parallelism:

    reduce(gradients, weight)   sum over ranks of weight * gradient, once a step, fused
    sum(vector)                 sum over ranks of a few numbers, in the forward pass

Both are called while a step is traced, by every rank in the same order. `InOrder` chains them,
so that every rank also *executes* them in that order; without it two ranks could each wait in a
different collective, or add up different gradients.

A pipeline has its gradients in arrays between the compiled passes, and no memory to copy them: it
calls `reduce_in_place(arrays, weight)`, which runs at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.distributed.sum_in_place import reduce_in_pieces

Gradient = Any  # tf.Tensor | tf.IndexedSlices
DEFAULT_LANE = "order"
OUTSIDE_XLA = "_ktrainer_outside_xla"  # an attribute of ops of a step that XLA is not to compile
_HALVES = (tf.float16, tf.bfloat16)
_WIRES = {"none": None, "fp16": tf.float16, "bf16": tf.bfloat16}


@cache
def _order_variable(lane: str) -> tf.Tensor:
    """The handle of a variable that every collective of a lane changes, before and after.

    TensorFlow runs operations that change the same variable in the order in which they were traced,
    also those in branches, loops and functions, which control dependencies do not reach.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=f"ktrainer_{lane}")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.zeros([], tf.int64))
        return handle


def _advance_order(lane: str) -> tf.Operation:
    return keep_outside_xla(
        tf.raw_ops.AssignAddVariableOp(resource=_order_variable(lane), value=tf.ones([], tf.int64))
    )


def keep_outside_xla(op: tf.Operation) -> tf.Operation:
    """`op`, left to TensorFlow where XLA compiles the step that it is in."""
    op._set_attr(OUTSIDE_XLA, tf.compat.v1.AttrValue(b=True))
    return op


class InOrder:
    """Runs collectives one after another in the order in which they were traced.

    A strategy's own are chained by control dependencies alone: TensorFlow keeps their order in
    branches too, and the variable would make replicas of one process wait for each other.

    Args:
        lane: collectives of different lanes have no order among each other, so they need
            communicators of their own, and a thread each.
    """

    def __init__(self, lane: str = DEFAULT_LANE) -> None:
        self._lane = lane
        self._last: list[tf.Operation] = []
        self._numbered = 0

    def number(self) -> int:
        """The number of a collective in this trace, from 1; the same on every rank, however often
        each of them has traced a step before."""
        self._numbered += 1
        return self._numbered

    def __call__(self, collective: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """The outputs of `collective`, which starts only after the one before has ended."""
        if tf.executing_eagerly():
            return collective()
        if tf.distribute.has_strategy():
            with tf.control_dependencies(self._last):
                outputs = collective()
            self._last = [outputs[0].op]
            return outputs
        with tf.control_dependencies([_advance_order(self._lane)]):
            outputs = collective()
        with tf.control_dependencies([outputs[0].op]):
            self._last = [_advance_order(self._lane)]
        return outputs

    def on_host(
        self,
        call: Callable[..., Any],
        inputs: Sequence[tf.Tensor],
        dtypes: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """The outputs of a host function, which starts only after the collective before has ended.

        Args:
            call: takes the arrays of `inputs`, and returns one array for each of `dtypes`, or a
                bare one.
        """
        if tf.executing_eagerly():
            return _call_eagerly(call, inputs, dtypes)
        if self._lane == DEFAULT_LANE:
            return self(lambda: list(tf.numpy_function(call, list(inputs), list(dtypes))))
        return self._without_state(call, inputs, dtypes)

    def _without_state(
        self, call: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """`on_host` in a lane of its own.

        TensorFlow orders all stateful functions, so that lanes would wait for each other; this one
        has no state. Such a function may run early, or not at all if no value depends on it: so it
        gets the order variable, and gives what that is increased by.
        """

        def counted(order: np.ndarray, *arrays: np.ndarray) -> list[Any]:
            found = call(*arrays)
            return [*([found] if isinstance(found, np.ndarray) else found), np.int64(1)]

        with tf.control_dependencies([_advance_order(self._lane)]):
            order = tf.raw_ops.ReadVariableOp(resource=_order_variable(self._lane), dtype=tf.int64)
            keep_outside_xla(order.op)
            *outputs, done = tf.numpy_function(
                counted, [order, *inputs], [*dtypes, tf.int64], stateful=False
            )
        advance = tf.raw_ops.AssignAddVariableOp(resource=_order_variable(self._lane), value=done)
        self._last = [keep_outside_xla(advance)]
        return outputs

    def ended(self) -> AbstractContextManager[Any]:
        """Within it operations run only once all collectives so far have ended."""
        return nullcontext() if tf.executing_eagerly() else tf.control_dependencies(self._last)


def _call_eagerly(
    call: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """The outputs of a host function, now. Not by numpy_function, which cannot read a scalar of
    bfloat16."""
    arrays = [each.numpy() if isinstance(each, tf.Tensor) else each for each in inputs]
    found = call(*map(np.asarray, arrays))
    outputs = [found] if isinstance(found, np.ndarray) else found
    return [tf.convert_to_tensor(x, d) for x, d in zip(outputs, dtypes, strict=True)]


class GradientCollectives(ABC):
    """Sums over ranks that a compiled step can contain.

    Attributes:
        name: the engine's name.
        size: how many ranks are summed over.
        seconds: time spent waiting in collectives so far; None if the engine does not know.
        error: the exception that ended the last collective.
        atomic: an update begins only once all gradients are reduced, so that it is applied whole
            or, if a collective fails, not at all.
        sparse_as_dense: IndexedSlices are turned into dense tensors before they are reduced.
        compression: `"none"`, or `"fp16"` or `"bf16"` for 16-bit floats on the wire.
    """

    name: str
    size: int = 1
    seconds: float | None = 0.0
    error: BaseException | None = None
    atomic: bool = False
    sparse_as_dense: bool = False
    compression: str = "none"

    @abstractmethod
    def reduce(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        order: InOrder,
        *,
        compressed: bool = True,
    ) -> list[Gradient]:
        """Sum over ranks of `weight * gradient`, for each gradient.

        Args:
            gradients: tensors or IndexedSlices; the same shapes and dtypes on every rank (the
                slices of an IndexedSlices may differ in number).
            weight: float64 scalar of this rank. If it is 0 the gradients are ignored, so that a
                NaN in them does no harm.
            order: runs this step's collectives one after another.
            compressed: False: no `compression`, for dense tensors that are no gradients. The
                change of a moving average in a step is less than 16 bits of it can tell.

        Returns:
            Reduced gradients of the same kinds, shapes and dtypes, bitwise equal on all ranks.
        """

    def reduce_in_place(self, arrays: Sequence[np.ndarray], weight: float) -> None:
        """Replace each array by the sum over ranks of `weight * array`, at once.

        It takes little memory, however large the arrays are. Of two ranks the sums have the bits
        that `reduce` gives; of more these depend on the order in which the engine adds. They are
        equal on all ranks.

        Args:
            arrays: contiguous dense gradients in host memory; the same shapes and dtypes on every
                rank.
            weight: as in `reduce`.
        """
        order, factor = InOrder(), tf.constant(weight, tf.float64)

        def start(array: np.ndarray) -> None:
            (total,) = self.reduce([tf.convert_to_tensor(array)], factor, order)
            array[:] = total.numpy()

        reduce_in_pieces(arrays, start)

    @abstractmethod
    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        """Sum over ranks of a tensor of the same shape and dtype on every rank."""

    def rank_and_size(self, rank: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """This rank's index among the ranks that are summed over, and their number, as int32.

        Args:
            rank: its index when the step was made.
        """
        return tf.cast(rank, tf.int32), tf.constant(self.size, tf.int32)

    def failure(self, error: BaseException) -> BaseException | None:
        """The cause of an `error` that TensorFlow raised in a step, if it was a collective.

        TensorFlow turns exceptions in collectives into errors of its own; this returns the
        original, once.
        """
        cause, self.error = self.error, None
        return cause

    def close(self) -> None:  # noqa: B027 - not every engine holds something
        """Release communicators and buffers."""


def wire_type(dtype: tf.DType, compression: str) -> tf.DType | None:
    """The 16-bit type in which gradients of `dtype` are sent; None: unchanged.

    Args:
        compression: `"none"`, or `"fp16"` or `"bf16"` for all floats.
    """
    if dtype in _HALVES:
        return dtype
    return _WIRES[compression] if dtype.is_floating else None


def weighted(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    """`weight * gradient`, which is 0 where the weight is 0, whatever the gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        values = weighted(gradient.values, weight)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = widened(gradient)  # 1 / 3 is no 16-bit number
    product = tf.math.multiply_no_nan(wide, tf.cast(weight, wide.dtype))
    return tf.cast(product, gradient.dtype)


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """16-bit floats as float32, in which products and sums of them are better."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in _HALVES else tensor


def densified(gradient: Gradient) -> tf.Tensor:
    """A dense tensor, repeated indices of an IndexedSlices summed."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient
