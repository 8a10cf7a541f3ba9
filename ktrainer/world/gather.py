"""Arrays that lie in different ranks, brought to one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ktrainer.world.arrays import BUCKET_BYTES
from ktrainer.world.base import World

if TYPE_CHECKING:
    from ktrainer.world.mpi_comm import MpiComm

_TAG = 71


def gather_arrays(
    wanted: Mapping[str, np.ndarray],
    mine: Iterable[str],
    read: Callable[[str], np.ndarray],
    world: World,
    what: str = "arrays",
) -> dict[str, np.ndarray]:
    """On rank 0 the arrays that only other ranks have, bitwise; on the others nothing.

    Between MPI's processes an array goes from the first rank that has it straight to rank 0. In
    other worlds it passes by the others too, in pieces that they let go.

    Args:
        wanted: stand-ins of all arrays; the same names, shapes and dtypes on every rank.
        mine: those of them that this rank has; what rank 0 has is not sent. Names that no rank
            has are missing from the result.
        read: an array of this rank by its name; asked for one at a time.
        world: the ranks; all of them must call this.
        what: names the operation, should its deadline pass.
    """
    received = {}
    for name, owner in _turns(world.allgather(list(mine), what)):
        spec = wanted[name]
        if world.rank == 0:
            received[name] = np.empty(spec.shape, spec.dtype)
            _move(received[name], owner, world, what)
        elif world.rank == owner:
            _move(np.array(read(name), spec.dtype, order="C"), owner, world, what)
        elif not _is_mpi(world):
            _move(np.empty(spec.shape, spec.dtype), owner, world, what)
    return received


def _turns(every: list[list[str]]) -> list[tuple[str, int]]:
    """(name, rank that sends it). The ranks take turns: then none waits for long."""
    taken = set(every[0])
    turns = []
    for rank, names in enumerate(every[1:], start=1):
        own = [name for name in names if name not in taken]
        taken.update(own)
        turns += [(place, rank, name) for place, name in enumerate(own)]
    return [(name, rank) for _, rank, name in sorted(turns)]


def _move(array: np.ndarray, owner: int, world: World, what: str) -> None:
    """Bring the bytes of `array` from rank `owner` to rank 0."""
    flat = array.reshape(-1).view(np.uint8)
    for start in range(0, flat.size, BUCKET_BYTES):
        piece = flat[start : start + BUCKET_BYTES]
        if not _is_mpi(world):
            piece[:] = world.broadcast(piece, owner, what)
            continue
        mpi: MpiComm = world  # type: ignore[assignment]
        if world.rank == 0:
            mpi.wait(mpi.comm.Irecv(piece, owner, _TAG), what)
        else:
            mpi.wait(mpi.comm.Isend(piece, 0, _TAG), what)


def _is_mpi(world: World) -> bool:
    return hasattr(world, "comm")
