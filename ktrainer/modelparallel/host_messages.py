"""Messages between processes: picklable objects, synchronous, each with a deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ktrainer.distributed import World, mpi_chunks
from ktrainer.errors import WorldError
from ktrainer.modelparallel.state import CommGroup, RankType, current

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm

_TAG = 0  # of objects, as in a pipeline's transport: tensors between stages have others


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Send a picklable object to all other ranks of a group, which call `recv_from`.

    Args:
        group: whose ranks they are; the others give `recv_from` this rank's number in it, with the
            `rank_type` of the group.

    Raises:
        WorldError: `group` is no CommGroup.
        DeadlineExceeded: a rank does not receive it.
    """
    world = _world(group)
    for rank in range(world.size):
        if rank != world.rank:
            send(obj, rank, RankType(group.value))


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """The picklable objects of all ranks of a group, in their order.

    Raises:
        WorldError, DeadlineExceeded: as `broadcast`.
    """
    return _world(group).allgather(obj, f"smp.allgather ({group.name})")


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Wait until all ranks of a group have called it.

    Raises:
        WorldError, DeadlineExceeded: as `broadcast`.
    """
    _world(group).barrier(f"smp.barrier ({group.name})")


def mp_barrier() -> None:
    """Wait until all stages of this replica have called it."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """Wait until all copies of this stage have called it."""
    barrier(CommGroup.DP_GROUP)


def send(obj: Any, dest_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Send a picklable object, and wait until the other rank receives it.

    Args:
        dest_rank: who calls `recv_from` meanwhile.
        rank_type: what that number counts.

    Raises:
        WorldError: there is no such rank, or it is this one.
        DeadlineExceeded: it does not receive it.
    """
    world = _peer(dest_rank, rank_type, "smp.send")
    what = f"smp.send to {rank_type.name} {dest_rank}"
    for part in mpi_chunks.parts_of_object(obj):
        world.wait(world.comm.Issend(part, dest_rank, _TAG), what, part)


def recv_from(src_rank: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """The next object that another rank sends to this one.

    Args:
        src_rank: who calls `send`.
        rank_type: what that number counts; the same that it gives.

    Raises:
        WorldError: there is no such rank, or it is this one.
        DeadlineExceeded: it does not send anything.
    """
    world = _peer(src_rank, rank_type, "smp.recv_from")
    what = f"smp.recv_from {rank_type.name} {src_rank}"

    def receive(parts: list[np.ndarray]) -> None:
        for part in parts:
            world.wait(world.comm.Irecv(part, src_rank, _TAG), what, part)

    return mpi_chunks.receive_object(receive)


def _world(group: Any) -> World:
    if not isinstance(group, CommGroup):
        raise WorldError(
            f"group={group!r} is none of smp.CommGroup.WORLD, smp.CommGroup.MP_GROUP and "
            "smp.CommGroup.DP_GROUP"
        )
    return current().group(group)


def _peer(rank: Any, rank_type: Any, call: str) -> MpiComm:
    """The group that `rank` is a number in.

    Raises:
        WorldError: it is none of its other ranks.
    """
    if not isinstance(rank_type, RankType):
        raise WorldError(
            f"{call}: rank_type={rank_type!r} is none of smp.RankType.WORLD_RANK, "
            "smp.RankType.MP_RANK and smp.RankType.DP_RANK"
        )
    world: Any = current().group(rank_type)
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
        raise WorldError(f"{call}: a rank is an integer, not {rank!r}")
    if not 0 <= rank < world.size or rank == world.rank:
        raise WorldError(
            f"{call}: there is no other process with {rank_type.name} {rank}; they are 0 to "
            f"{world.size - 1}, and this process is {world.rank}"
        )
    return world
