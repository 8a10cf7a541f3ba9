"""Collectives on the first axis of tensors: gather, exchange and scatter rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.dataparallel.calls import Call, call_of, rows_spec, spec_of
from ktrainer.dataparallel.collectives import sum_of_gradients
from ktrainer.dataparallel.host_calls import as_tensor, call_in_order, ranks_now
from ktrainer.dataparallel.options import Compression, ReduceOp, checked_compression, checked_op
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.rank_group import RankGroup
from ktrainer.dataparallel.reductions import reduce_one
from ktrainer.dataparallel.state import group_of
from ktrainer.errors import DataError


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> tf.Tensor:
    """The rows of all ranks, those of rank 0 first.

    Its gradient is the sum of all ranks' gradients of this rank's rows.

    Args:
        tensor: with at least one axis; ranks may have different numbers of rows, or none, but the
            other dimensions are the same.
        name, ignore_name_scope, process_set: as for `allreduce`.
    """
    group, value = group_of(process_set), _with_rows(tensor, "allgather")
    return value if group.single else _gathered(group, value, _named("allgather", name))


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> list[tf.Tensor]:
    """`allgather` of each tensor of a list, in order."""
    return [allgather(tensor, name, ignore_name_scope, process_set) for tensor in tensors]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Rows sent from each rank to each rank.

    Args:
        tensor: rows, those for rank 0 first.
        splits: how many rows go to each rank; default: the same number to each.
        name, ignore_name_scope, process_set: as for `allreduce`.

    Returns:
        The rows that have arrived, those of rank 0 first; with `splits` also how many came from
        each rank, as int32.

    Raises:
        DataError: the splits do not add up to the rows, or rows cannot be split evenly.
    """
    group, value = group_of(process_set), _with_rows(tensor, "alltoall")
    size = ranks_now(group)[1]
    numbers = _even_splits(value, size) if splits is None else tf.convert_to_tensor(splits)
    numbers = _checked_splits(value, tf.cast(numbers, tf.int64), _static_size(group))
    if group.single:
        arrived, counts = value, _whole(value, numbers)
    else:
        arrived, counts = _exchanged(group, value, numbers, _named("alltoall", name))
    return arrived if splits is None else (arrived, tf.cast(counts, tf.int32))


def reducescatter(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    compression: Compression = Compression.none,
) -> tf.Tensor:
    """This rank's share of the rows of a tensor that is reduced over ranks.

    Ranks get equal numbers of rows, the first ones one more where they do not divide evenly.

    Args:
        tensor: of the same shape and type on every rank, with at least one axis.
        op, name, process_set, ignore_name_scope, compression: as for `allreduce`.
    """
    group, value = group_of(process_set), _with_rows(tensor, "reducescatter")
    op, compression = checked_op(op), checked_compression(compression)
    if not group.single:
        value = reduce_one(group.others, value, op, _named("reducescatter", name), compression)
    rows, (rank, size) = tf.shape(value)[0], ranks_now(group)
    base, more = rows // size, rows % size
    start = base * rank + tf.minimum(rank, more)
    return value[start : start + base + tf.cast(rank < more, tf.int32)]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    ignore_name_scope: bool = False,
    compression: Compression = Compression.none,
) -> list[tf.Tensor]:
    """`reducescatter` of each tensor of a list, in order."""
    return [
        reducescatter(tensor, op, name, process_set, compression=compression) for tensor in tensors
    ]


def _gathered(group: RankGroup, tensor: tf.Tensor, operation: str) -> tf.Tensor:
    @tf.custom_gradient
    def gathered(value: tf.Tensor) -> Any:
        found, rows = call_in_order(
            group.others,
            lambda array: call_of(operation, "gather", (rows_spec(array),)),
            [value],
            [value.dtype, tf.int64],
        )
        rows.set_shape([_static_size(group)])
        found.set_shape([None, *value.shape[1:]])

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = sum_of_gradients(group.others, upstream, operation)
            rank, _ = ranks_now(group)
            start = tf.reduce_sum(rows[:rank])
            return total[start : start + rows[rank]]

        return found, gradient

    return gathered(tensor)


def _exchanged(
    group: RankGroup, tensor: tf.Tensor, splits: tf.Tensor, operation: str
) -> tuple[tf.Tensor, tf.Tensor]:
    counts: list[tf.Tensor] = []

    @tf.custom_gradient
    def exchanged(value: tf.Tensor) -> Any:
        arrived, came = call_in_order(
            group.others,
            lambda array, numbers: _exchange_call(operation, array, numbers, group.size),
            [value, splits],
        )
        came.set_shape([_static_size(group)])
        arrived.set_shape([None, *value.shape[1:]])
        counts.append(came)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return _exchanged(group, upstream, came, f"gradient of {operation}")[0]

        return arrived, gradient

    return exchanged(tensor), counts[-1]


def _exchange_call(operation: str, array: np.ndarray, splits: np.ndarray, size: int) -> Call:
    wrong = len(splits) != size or splits.sum() != len(array) or splits.min() < 0
    if wrong:  # the other ranks wait: they must hear of it
        return call_of(_wrong_splits(operation, splits, len(array), size), "refused")
    return call_of(operation, "exchange", (rows_spec(array), spec_of(splits)))


def _wrong_splits(operation: str, splits: np.ndarray, rows: int, size: int) -> str:
    number = f" for {size} ranks" if len(splits) != size else ""
    return f"{operation}, whose splits {splits.tolist()} do not add up to its {rows} rows{number}"


def _with_rows(value: Any, what: str) -> tf.Tensor:
    tensor = as_tensor(value, what)
    if tensor.shape.rank == 0:
        raise DataError(
            f"{what} communicates the rows of a tensor, and a scalar has none. Make it a vector: "
            "tf.reshape(value, [1])."
        )
    return tensor


def _static_size(group: RankGroup) -> int | None:
    """The number of ranks, unless it may change while compiled functions are in use."""
    return None if group.world.heals else group.size


def _even_splits(tensor: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    number = tf.cast(size, tf.int64)
    return tf.fill([number], tf.shape(tensor, out_type=tf.int64)[0] // number)


def _whole(tensor: tf.Tensor, splits: tf.Tensor) -> tf.Tensor:
    """The splits of one process, which gets all rows."""
    rows, numbers = tensor.shape[0], tf.get_static_value(splits)
    if rows is not None and numbers is not None and numbers.tolist() != [rows]:
        raise DataError(f"{_wrong_splits('alltoall', numbers, rows, 1)}.")
    return splits


def _checked_splits(tensor: tf.Tensor, splits: tf.Tensor, size: int | None) -> tf.Tensor:
    wrong = size is not None and splits.shape[0] not in (None, size)
    if splits.shape.rank != 1 or wrong:
        raise DataError(
            f"the splits of an alltoall have the shape {splits.shape}; give a list of {size} "
            "numbers, how many rows go to each rank."
        )
    return splits


def _named(operation: str, name: str | None) -> str:
    return operation + (f" {name!r}" if name else "")
