"""Broadcast and gather many arrays between ranks, in messages of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ktrainer.distributed.world import World

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm

BUCKET_BYTES = 16 * 2**20  # bounds the extra host memory; one message carries up to this much
_TAG = 71


def broadcast_arrays(
    arrays: Sequence[np.ndarray], world: World, root: int = 0, what: str = "arrays"
) -> list[np.ndarray]:
    """The arrays of rank `root`, bitwise, on every rank; on `root` they are those given.

    Args:
        arrays: of the same shapes and dtypes on every rank, which is not checked here.
        world: the ranks; all of them must call this.
        root: whose values are sent.
        what: names the operation, should its deadline pass.
    """
    named = {str(k): array for k, array in enumerate(arrays)}
    return list(broadcast_chosen(named, named.keys(), world, root, what).values())


def placeholder(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """A read-only array of this shape and dtype that takes no memory: its values are all zero."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def broadcast_chosen(
    arrays: Mapping[str, np.ndarray],
    keep: Collection[str],
    world: World,
    root: int = 0,
    what: str = "arrays",
) -> dict[str, np.ndarray]:
    """The arrays of rank `root` that this rank asks for, bitwise.

    They pass by in pieces, so that a rank never has more than it keeps and one message.

    Args:
        arrays: on `root` the arrays; elsewhere placeholders of the same names, shapes and dtypes,
            in the same order.
        keep: the names that this rank asks for; each rank its own.
        world: the ranks; all of them must call this.
        root: whose values are sent.
        what: names the operation, should its deadline pass.
    """
    here = world.rank == root
    kept = {
        name: array if here else np.empty(array.shape, array.dtype)
        for name, array in arrays.items()
        if name in keep
    }
    if world.size == 1:
        return kept
    for message in _messages({name: array.nbytes for name, array in arrays.items()}):
        if here:
            flat = np.concatenate([_bytes(arrays[name])[a:b] for name, a, b in message])
        else:
            flat = np.empty(sum(b - a for _, a, b in message), np.uint8)
        flat = world.broadcast(flat, root, what)
        at = 0
        for name, a, b in message:
            if name in kept and not here:
                _bytes(kept[name])[a:b] = flat[at : at + b - a]
            at += b - a
    return kept


def _messages(sizes: Mapping[str, int]) -> list[list[tuple[str, int, int]]]:
    """Pieces (name, first byte, end) of at most BUCKET_BYTES in all for each message."""
    messages: list[list[tuple[str, int, int]]] = []
    room = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if room == 0:
                messages.append([])
                room = BUCKET_BYTES
            end = min(size, start + room)
            messages[-1].append((name, start, end))
            room -= end - start
            start = end
    return messages


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of `sizes`, in runs of at most BUCKET_BYTES in all (or one item); 0 is skipped."""
    found: list[list[int]] = []
    filled = BUCKET_BYTES
    for i, size in enumerate(sizes):
        if size == 0:
            continue
        if filled + size > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(i)
        filled += size
    return found


def gather_arrays(
    wanted: Mapping[str, np.ndarray],
    mine: Iterable[str],
    read: Callable[[str], np.ndarray],
    world: World,
    what: str = "arrays",
) -> dict[str, np.ndarray]:
    """Collect on rank 0 the arrays that only other ranks have, bitwise; empty on the others.

    Between MPI's processes an array goes from the first rank that has it straight to rank 0. In
    other worlds it passes by the others too, in pieces that they discard.

    Args:
        wanted: placeholders of all arrays; the same names, shapes and dtypes on every rank.
        mine: those of them that this rank has; what rank 0 has is not sent. Names that no rank
            has are missing from the result.
        read: an array of this rank by its name; asked for one at a time.
        world: the ranks; all of them must call this.
        what: names the operation, should its deadline pass.
    """
    received = {}
    for name, owner in _send_order(world.allgather(list(mine), what)):
        spec = wanted[name]
        if world.rank == 0:
            received[name] = np.empty(spec.shape, spec.dtype)
            _move(received[name], owner, world, what)
        elif world.rank == owner:
            _move(np.array(read(name), spec.dtype, order="C"), owner, world, what)
        elif not _is_mpi(world):
            _move(np.empty(spec.shape, spec.dtype), owner, world, what)
    return received


def _send_order(every: list[list[str]]) -> list[tuple[str, int]]:
    """(name, rank that sends it). The ranks alternate, so that none waits for long."""
    taken = set(every[0])
    order = []
    for rank, names in enumerate(every[1:], start=1):
        own = [name for name in names if name not in taken]
        taken.update(own)
        order += [(index, rank, name) for index, name in enumerate(own)]
    return [(name, rank) for _, rank, name in sorted(order)]


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
