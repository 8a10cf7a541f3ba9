"""Reductions of lists of tensors over the ranks of a process set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from ktrainer.dataparallel.adasum import check_ranks
from ktrainer.dataparallel.calls import call_of, specs_of
from ktrainer.dataparallel.host_calls import call_in_order, in_order, refuse_xla
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.distributed.collectives import Gradient, InOrder, densified
from ktrainer.errors import ModelError

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel

_ADDS = (ReduceOp.SUM, ReduceOp.AVERAGE)


def reduce_list(
    channel: Channel,
    tensors: Sequence[Gradient],
    op: ReduceOp,
    operation: str,
    compression: Compression = Compression.none,
    bucket_mb: float = 25.0,
) -> list[Gradient]:
    """Each tensor reduced over the ranks of a channel, in a fixed order.

    Args:
        tensors: of floats and integers, of the same shapes and types on every rank. The slices of
            IndexedSlices may differ in number; only sums and averages keep them sparse.
        op: averages of integers are rounded down.
        operation: names the calls in messages.
        compression: of floats that are summed or averaged.
        bucket_mb: largest fused buffer, in MiB.

    Returns:
        Tensors of the same shapes and types, bitwise equal on all ranks.
    """
    refuse_xla()
    operation = f"{operation} ({op.value})"
    if op is ReduceOp.ADASUM:
        return _adasum(channel, [densified(tensor) for tensor in tensors], operation)
    tensors = [t if op in _ADDS else densified(t) for t in tensors]
    fused = [k for k, t in enumerate(tensors) if op in _ADDS and t.dtype.is_floating]
    mean = op is ReduceOp.AVERAGE
    sums = channel.sums.configured(operation, compression.value, bucket_mb, mean)
    weight = tf.ones([], tf.float64)
    static = [k for k in fused if _has_static_shape(tensors[k])]
    reduced = list(tensors)
    found = sums.reduce([tensors[k] for k in static], weight, InOrder(channel.name))
    for k, total in zip(static, found, strict=True):
        reduced[k] = total
    for k in sorted(set(fused) - set(static)):
        (reduced[k],) = in_order(channel, sums.reduce_now, [weight, tensors[k]], [tensors[k].dtype])
    for k in sorted(set(range(len(tensors))) - set(fused)):
        reduced[k] = _reduce_one(channel, tensors[k], op, operation)
    for total, tensor in zip(reduced, tensors, strict=True):
        if isinstance(total, tf.Tensor):
            total.set_shape(tensor.shape)
    return reduced


def reduce_one(
    channel: Channel, tensor: Gradient, op: ReduceOp, operation: str, compression: Compression
) -> Any:
    """A tensor reduced over ranks; differentiable as `reduce_group` is."""
    return reduce_group(channel, [tensor], op, operation, compression)[0]


def reduce_group(
    channel: Channel,
    tensors: Sequence[Gradient],
    op: ReduceOp,
    operation: str,
    compression: Compression,
) -> list[Any]:
    """Tensors reduced over ranks; differentiable if they are sums or averages, but for lists with
    IndexedSlices.

    The gradient of a sum over ranks is the sum of the ranks' gradients; likewise an average's.
    """
    if not tensors or any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        return reduce_list(channel, tensors, op, operation, compression)

    @tf.custom_gradient
    def reduced(*values: tf.Tensor) -> Any:
        def gradient(*upstream: Any) -> list[Any]:
            if op not in _ADDS:
                raise ModelError(
                    f"{operation} ({op.value}) has no gradient. Differentiate a sum or an average, "
                    "or stop the gradient with tf.stop_gradient."
                )
            floats = [k for k, value in enumerate(values) if value.dtype.is_floating]
            given = [tf.convert_to_tensor(upstream[k]) for k in floats]
            name, found = f"gradient of {operation}", [None] * len(values)
            totals = reduce_list(channel, given, op, name, compression)
            for k, total in zip(floats, totals, strict=True):
                found[k] = total
            return found

        return reduce_list(channel, values, op, operation, compression), gradient

    return list(reduced(*tensors))


def _has_static_shape(tensor: Gradient) -> bool:
    return isinstance(tensor, tf.IndexedSlices) or tensor.shape.is_fully_defined()


def _reduce_one(channel: Channel, tensor: Gradient, op: ReduceOp, operation: str) -> tf.Tensor:
    make = partial(_reduction, operation, op.value)
    return call_in_order(channel, make, [densified(tensor)])[0]


def _reduction(operation: str, op: str, array: np.ndarray) -> Any:
    return call_of(operation, "reduce", specs_of([array]), op)


def _adasum(channel: Channel, tensors: list[tf.Tensor], operation: str) -> list[Gradient]:
    check_ranks(channel.size)
    integers = [tensor.dtype.name for tensor in tensors if not tensor.dtype.is_floating]
    if integers:
        raise ModelError(f"Adasum combines gradients, which are floats, not {integers[0]}.")
    if not tensors:
        return []
    reduced = call_in_order(
        channel, lambda *arrays: call_of(operation, "adasum", specs_of(arrays)), tensors
    )
    for total, tensor in zip(reduced, tensors, strict=True):
        total.set_shape(tensor.shape)
    return reduced
