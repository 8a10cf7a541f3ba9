"""Collective calls on arrays in host memory, once the ranks have agreed on them.

Each handler runs on all ranks of a channel at once. `neutral` gives the values of a rank that has
joined; without it a call is refused while ranks have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ktrainer.dataparallel.adasum import adasum_over_ranks
from ktrainer.dataparallel.calls import Call
from ktrainer.distributed.array_transfer import broadcast_arrays
from ktrainer.errors import DataError, WorldError, name_ranks

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel

_WITH_ROOT = ("broadcast", "object from a root")
Arrays = list[np.ndarray]
Present = Sequence[int]


class Handler(NamedTuple):
    """The part of one rank in a kind of call."""

    run: Callable[[Channel, Call, Any, Present], Any]
    neutral: Callable[[Call], Any] | None = None


def carry_out(channel: Channel, call: Call, given: Any) -> Any:
    """Agree on a call with the other ranks of a channel, and do this rank's part of it.

    Args:
        given: arrays, or an object, of this rank.

    Raises:
        WorldError: ranks have joined, and this kind of call has no neutral value; or its root is
            no rank any more.
    """
    handler = HANDLERS[call.kind]
    with channel.call(call) as present:
        _check_root(channel, call)
        _check_joined(channel, call, handler, present)
        return handler.run(channel, call, given, present)


def take_part(channel: Channel, call: Call, present: Present) -> None:
    """Do the part of a rank that has joined in a call of the others, unless it is refused there."""
    handler = HANDLERS[call.kind]
    if handler.neutral is not None and _roots_are(present, call):
        handler.run(channel, call, handler.neutral(call), present)


def _check_joined(channel: Channel, call: Call, handler: Handler, present: Present) -> None:
    joined = [channel.world.ranks[k] for k in range(channel.size) if k not in present]
    if joined and (handler.neutral is None or not _roots_are(present, call)):
        raise WorldError(
            f"{call.operation} cannot run, because {name_ranks(joined)} called join(): ranks that "
            "have joined take part in sums and other reductions, gathers, barriers, and broadcasts "
            "from other ranks. Call it before the first rank joins, or after join() has returned."
        )


def _check_root(channel: Channel, call: Call) -> None:
    """Refuse a root that a compiled function has from before ranks were lost."""
    if call.kind in _WITH_ROOT and call.detail >= channel.size:
        raise WorldError(
            f"{call.operation}, compiled when there were more ranks, has no root any more: there "
            f"are {channel.size}. Broadcast from rank 0, which there always is."
        )


def _roots_are(present: Present, call: Call) -> bool:
    """Whether the root of a call, if it has one, has not joined."""
    return call.kind not in _WITH_ROOT or call.detail in present


def _reduce(channel: Channel, call: Call, arrays: Arrays, present: Present) -> Arrays:
    (array,), op = arrays, call.detail
    if op == "product":
        factors = [a for k, a in enumerate(channel.world.allgather(array)) if k in present]
        return [np.prod(factors, axis=0, dtype=array.dtype)]
    if op == "average":
        return [_average(channel, array, len(present), str(call))]
    return [channel.world.oob_allreduce(array, op, str(call))]


def _average(channel: Channel, array: np.ndarray, ranks: int, what: str) -> np.ndarray:
    """The average of integers, rounded down; their sum may be beyond their type."""
    wide = array.astype(np.uint64 if array.dtype == np.uint64 else np.int64)
    parts = np.stack(np.divmod(wide, wide.dtype.type(ranks)))  # each rank's quotient and remainder
    quotient, remainder = channel.world.oob_allreduce(parts, "sum", what)
    average: np.ndarray = quotient + remainder // wide.dtype.type(ranks)
    return average.astype(array.dtype)


def _neutral_of_reduction(call: Call) -> Arrays:
    (spec,) = call.tensors
    dtype = np.dtype(spec.dtype)
    if call.detail not in ("min", "max"):
        return [np.zeros(spec.shape, dtype)]
    if dtype.kind in "iu":
        limits: Any = np.iinfo(dtype)
        value = limits.max if call.detail == "min" else limits.min
    else:
        value = np.inf if call.detail == "min" else -np.inf
    return [np.full(spec.shape, value, dtype)]


def _gather(channel: Channel, call: Call, arrays: Arrays, present: Present) -> Arrays:
    from ktrainer.distributed.mpi_rows import gather_rows  # importing MPI starts it

    gathered, world = [], channel.world
    for array in arrays:
        mine, rows = np.array([len(array)], np.int64), np.empty(channel.size, np.int64)
        world.wait(world.comm.Iallgather(mine, rows), str(call), mine, rows)
        gathered += [gather_rows(world, world.comm, array, rows, str(call)), rows]
    return gathered


def _neutral_rows(call: Call) -> Arrays:
    return [np.zeros((0, *spec.shape[1:]), spec.dtype) for spec in call.tensors]


def _broadcast(channel: Channel, call: Call, arrays: Arrays, present: Present) -> Arrays:
    return broadcast_arrays(arrays, channel.world, call.detail, str(call))


def _placeholders(call: Call) -> Arrays:
    return [np.zeros(spec.shape, spec.dtype) for spec in call.tensors]


def _exchange(channel: Channel, call: Call, arrays: Arrays, present: Present) -> Arrays:
    from ktrainer.distributed.mpi_rows import exchange_rows

    array, splits = arrays
    return list(exchange_rows(channel.world, array, splits, str(call)))


def _adasum(channel: Channel, call: Call, arrays: Arrays, present: Present) -> Arrays:
    return adasum_over_ranks(channel.world, arrays, str(call))


def _object_of_root(channel: Channel, call: Call, value: Any, present: Present) -> Any:
    return channel.world.broadcast([value, "object"], call.detail, str(call))[0]


def _objects(channel: Channel, call: Call, value: Any, present: Present) -> list[Any]:
    every = channel.world.allgather(value, str(call))
    return [each for k, each in enumerate(every) if k in present]


def _refuse(channel: Channel, call: Call, given: Any, present: Present) -> Any:
    """A call that all ranks have made alike, with inputs that it cannot have."""
    raise DataError(f"{call.operation}.")


def _nothing(*_: Any) -> None:
    """A barrier: the ranks have compared their calls, so all are here."""


HANDLERS = {
    "reduce": Handler(_reduce, _neutral_of_reduction),
    "gather": Handler(_gather, _neutral_rows),
    "broadcast": Handler(_broadcast, _placeholders),
    "exchange": Handler(_exchange),
    "adasum": Handler(_adasum),
    "object from a root": Handler(_object_of_root, _nothing),
    "objects": Handler(_objects, _nothing),
    "refused": Handler(_refuse),
    "barrier": Handler(_nothing, _nothing),
    "run": Handler(lambda channel, call, function, present: function(channel.world)),
}
