"""`allreduce`, `oob_allreduce`, `broadcast` and their kin, for tensors.

All of them work eagerly and inside of `tf.function`, where their order is that of the code.
`allreduce` and `grouped_allreduce` use the channel of gradients, everything else another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ktrainer.dataparallel.calls import call_of, specs_of
from ktrainer.dataparallel.host_calls import as_tensor, call_in_order, ranks_now
from ktrainer.dataparallel.options import (
    Compression,
    ReduceOp,
    checked_compression,
    checked_op,
    refuse_devices,
)
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.rank_group import RankGroup
from ktrainer.dataparallel.reductions import reduce_group, reduce_list, reduce_one
from ktrainer.dataparallel.state import group_of
from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel


def allreduce(
    tensor: Any,
    *place: Any,
    param_index: int | None = None,
    num_params: int | None = None,
    compression: Compression = Compression.none,
    op: ReduceOp | None = None,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
) -> Any:
    """A tensor reduced over all ranks, on the channel of gradients.

    Positional arguments after the tensor are those of SageMaker's library, `param_index` and
    `num_params`, or a single bool, which is Horovod's `average`; all else goes by name.

    Args:
        tensor: floats or integers, of the same shape and type on every rank; or IndexedSlices.
        param_index, num_params: its place in a list of gradients, and the length of that. Ranks
            that are at different places get an error.
        compression: the type of floats on the wire; for sums and averages.
        op: default: `ReduceOp.AVERAGE`, which rounds integers down.
        average: Horovod's older name for op: True for an average, False for a sum.
        device_dense, device_sparse: refused if given.
        prescale_factor, postscale_factor: multiply it before and after; integers in float64, which
            holds them exactly up to 2**53.
        name: names the call in messages; ranks with different names get an error.
        process_set: the ranks; default: all.
        ignore_name_scope: changes nothing: no name depends on scopes.

    Returns:
        A tensor of the same shape and type, equal on all ranks.

    Raises:
        DivergenceError: ranks are in different calls.
        DeadlineExceeded, PeerLost: a rank does not call it.
    """
    if len(place) == 1 and isinstance(place[0], bool):
        average = place[0]
    elif place:
        param_index, num_params = _checked_place(place, param_index, num_params)
    refuse_devices(device_dense, device_sparse)
    group, op = group_of(process_set), checked_op(op, average)
    operation = _named("allreduce", name, param_index, num_params)
    value = tensor if isinstance(tensor, tf.IndexedSlices) else as_tensor(tensor, "allreduce")
    compression = checked_compression(compression)
    value = _scaled(value, prescale_factor)
    if not group.single:
        value = reduce_one(group.gradients, value, op, operation, compression)
    return _scaled(value, postscale_factor)


def oob_allreduce(
    tensor: Any,
    compression: Compression = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """A tensor reduced over all ranks out of band: for all that is not a gradient.

    It never waits for an `allreduce`, and an `allreduce` never for it. Arguments, result and errors
    are those of `allreduce`. Threads that call it at the same time must each give a name: one
    rank's call of one thread could else meet another rank's of the other.
    """
    group, op, value = group_of(process_set), checked_op(op), as_tensor(tensor, "oob_allreduce")
    compression = checked_compression(compression)
    if group.single:
        return value
    return reduce_one(group.others, value, op, _named("oob_allreduce", name), compression)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """A list of tensors reduced over all ranks, in fused buffers; as `allreduce` of each."""
    refuse_devices(device_dense, device_sparse)
    group, op = group_of(process_set), checked_op(op, average)
    compression = checked_compression(compression)
    values = [
        t if isinstance(t, tf.IndexedSlices) else as_tensor(t, "grouped_allreduce") for t in tensors
    ]
    values = [_scaled(value, prescale_factor) for value in values]
    if not group.single:
        operation = _named("grouped_allreduce", name)
        values = reduce_group(group.gradients, values, op, operation, compression)
    return [_scaled(value, postscale_factor) for value in values]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """The tensor of rank `root_rank`, on every rank.

    Its gradient on the root is the sum of all ranks' gradients, and 0 on the others.

    Args:
        tensor: of the same shape and type on every rank.
        root_rank: a rank among all processes, in a process set too.
        name, ignore_name_scope, process_set: as for `allreduce`.
    """
    group, value = group_of(process_set), as_tensor(tensor, "broadcast")
    root = group.position_of(root_rank)
    if group.single:
        return value
    operation = _named(f"broadcast from rank {root_rank}", name)
    return _broadcast(group, value, root, operation)


def overlap(tensor: Any) -> Any:
    """`tensor` itself.

    In SageMaker's library it marks where an XLA-compiled model may start to reduce. Here the
    all-reduce of a bucket overlaps the rest of the backward pass without a mark, under
    `trainer.xla` too.
    """
    return tf.convert_to_tensor(tensor)


def _broadcast(group: RankGroup, tensor: tf.Tensor, root: int, operation: str) -> tf.Tensor:
    @tf.custom_gradient
    def sent(value: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = sum_of_gradients(group.others, upstream, operation)
            return tf.where(tf.equal(ranks_now(group)[0], root), total, tf.zeros_like(total))

        (received,) = call_in_order(
            group.others, lambda a: call_of(operation, "broadcast", specs_of([a]), root), [value]
        )
        received.set_shape(value.shape)
        return received, gradient

    return sent(tensor)


def sum_of_gradients(channel: Channel, upstream: tf.Tensor, operation: str) -> tf.Tensor:
    """The sum over ranks of the gradients of a collective's output."""
    return reduce_list(channel, [upstream], ReduceOp.SUM, f"gradient of {operation}")[0]


def _scaled(value: Any, factor: float) -> Any:
    if factor == 1:
        return value
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(value.values, factor), value.indices, value.dense_shape)
    if value.dtype.is_integer and factor != int(factor):
        return tf.cast(tf.cast(value, tf.float64) * factor, value.dtype)
    if value.dtype.size == 2:  # the factor would lose digits
        return tf.cast(tf.cast(value, tf.float32) * factor, value.dtype)
    return value * tf.cast(factor, value.dtype)


def _named(
    operation: str, name: str | None, param_index: int | None = None, num_params: int | None = None
) -> str:
    """The operation, for messages and for the comparison of ranks."""
    of = "" if param_index is None else f" of parameter {param_index} of {num_params}"
    return f"{operation}{of}" + (f" {name!r}" if name else "")


def _checked_place(
    place: Sequence[Any], param_index: int | None, num_params: int | None
) -> tuple[int, int]:
    given = [*place, *(each for each in (param_index, num_params) if each is not None)]
    if len(given) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in given):
        return given[0], given[1]
    raise ConfigError(
        f"allreduce was called with {', '.join(map(repr, place))} after the tensor. Two positional "
        "numbers are param_index and num_params, a single bool is Horovod's average; give all else "
        "by name: compression=, op=, name=, process_set=."
    )


__all__ = [
    "allreduce",
    "broadcast",
    "grouped_allreduce",
    "oob_allreduce",
    "overlap",
    "sum_of_gradients",
]
