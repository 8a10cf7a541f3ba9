"""Sums and rows of arrays of ranks of one host, through memory that all of them have mapped.

Each rank has a part of it. Arrays are summed in four steps, of which each is one pass over half of
them for two ranks:

    each rank writes the others' segments of its arrays to its part
    barrier
    it adds up its own segments, from the parts of all ranks in their order, and writes the sums
    barrier
    it reads the other segments' sums

Rows are gathered with one barrier: each rank writes its own, and reads those of all. Messages
between two processes copy each byte once more, and each is another wait for the other rank.

There are two buffers, which take turns: a rank that writes to one knows, from the barriers since it
was last used, that all have read it.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from ktrainer.distributed.sum_in_place import (
    MOST_RANKS,
    PIECE_BYTES,
    Views,
    add_up,
    pieces,
    segments_of,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from ktrainer.distributed.mpi_communicator import MpiComm

_BUFFERS = 2
_ALIGNED = 64  # bytes, to a multiple of which TensorFlow aligns its tensors


class SharedMemory:
    """Memory that the ranks of a communicator share.

    Args:
        world: waits, with its deadline.
        comm: a communicator of its ranks.
        parts: of each rank, `_BUFFERS * PIECE_BYTES` bytes.
    """

    def __init__(self, world: MpiComm, comm: MPI.Intracomm, parts: Sequence[np.ndarray]) -> None:
        self._world, self._comm = world, comm
        spans = [slice(k * PIECE_BYTES, (k + 1) * PIECE_BYTES) for k in range(_BUFFERS)]
        self._buffers = cycle([[part[span] for part in parts] for span in spans])

    def sum_in_place(self, arrays: Views, what: str) -> None:
        """Replace flat arrays by their sums over ranks; the bits are those of `sum_in_place`.

        Args:
            arrays: contiguous; of the same lengths and dtypes on all ranks.
            what: what is summed, for messages.
        """
        for views in pieces(arrays):
            self._sum_piece(views, f"all-reduce of {what}")

    def _sum_piece(self, arrays: Views, what: str) -> None:
        rank, buffer = self._comm.rank, next(self._buffers)
        others = [each for each in range(len(buffer)) if each != rank]
        sizes = [array.nbytes for array in arrays]
        segments = [segments_of(array, len(buffer)) for array in arrays]
        places = zip(*(_divide(part, sizes) for part in buffer), strict=True)
        shared = [  # for each array, the segments of its place in the parts of all ranks
            [segments_of(place.view(array.dtype), len(buffer)) for place in every]
            for array, every in zip(arrays, places, strict=True)
        ]
        for own, parts in zip(segments, shared, strict=True):
            for other in others:
                parts[rank][other][:] = own[other]
        self._world.wait(self._comm.Ibarrier(), what)
        for own, parts in zip(segments, shared, strict=True):
            addends = [part[rank] for part in parts]
            addends[rank] = own[rank]
            add_up(own[rank], addends)
            parts[rank][rank][:] = own[rank]
        self._world.wait(self._comm.Ibarrier(), what)
        for own, parts in zip(segments, shared, strict=True):
            for other in others:
                own[other][:] = parts[other][other]

    def gather_rows(self, arrays: Sequence[np.ndarray], what: str) -> list[np.ndarray]:
        """The rows of all ranks, ordered by rank; `rows_at_once(arrays)` must not be 0.

        Args:
            arrays: that have as many rows each, on each rank its own number; otherwise of the same
                shapes and dtypes on all ranks.
            what: what is gathered, for messages.
        """
        at_once, count = rows_at_once(arrays), len(arrays[0])
        gathered: list[np.ndarray] = []
        counts, taken = [count], 0
        while not gathered or taken < max(counts):
            places = [_places_of_rows(part, arrays, at_once) for part in next(self._buffers)]
            (number, *own), piece = places[self._comm.rank], slice(taken, taken + at_once)
            number[0] = count
            for place, array in zip(own, arrays, strict=True):
                place[: len(array[piece])] = array[piece]
            self._world.wait(self._comm.Ibarrier(), f"all-gather of {what}")
            if not gathered:
                counts = [int(number[0]) for number, *_ in places]
                gathered = [_empty((sum(counts), *each.shape[1:]), each.dtype) for each in arrays]
            for first, last, (_, *parts) in zip(
                np.cumsum([0, *counts[:-1]]), np.cumsum(counts), places, strict=True
            ):
                for rows, part in zip(gathered, parts, strict=True):
                    found = rows[first:last][piece]
                    found[:] = part[: len(found)]
            taken += at_once
        return gathered


def rows_at_once(arrays: Sequence[np.ndarray]) -> int:
    """How many rows of all `arrays` fit into a rank's part of the memory; 0: they are too long."""
    row = sum(array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays)
    return (PIECE_BYTES - _ALIGNED) // max(1, row) // _ALIGNED * _ALIGNED


def _places_of_rows(part: np.ndarray, arrays: Sequence[np.ndarray], rows: int) -> Views:
    """Where a rank writes its number of rows, and so many rows of each array."""
    spaces = [rows * array.dtype.itemsize * math.prod(array.shape[1:]) for array in arrays]
    number, *places = _divide(part, [_ALIGNED, *spaces])
    shaped = [
        place.view(array.dtype).reshape(rows, *array.shape[1:])
        for place, array in zip(places, arrays, strict=True)
    ]
    return [number.view(np.int64), *shaped]


def _divide(part: np.ndarray, sizes: Sequence[int]) -> Views:
    """Places of so many bytes each, one after another."""
    return [part[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array in memory that TensorFlow takes as a tensor's without copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    space = np.empty(nbytes + _ALIGNED, np.uint8)
    start = -space.ctypes.data % _ALIGNED
    return space[start : start + nbytes].view(dtype).reshape(shape)


def open_shared_memory(
    world: MpiComm, comm: MPI.Intracomm, ranks: Sequence[int] | None = None
) -> SharedMemory | None:
    """Memory that ranks share; None where they cannot. All ranks call it together.

    It has no name in any file system, so that nothing is left behind, however a process ends: each
    rank opens the others' by their process ids, which needs Linux, and one host or container.

    Args:
        comm: a communicator of these ranks.
        ranks: of `world`, that share memory with this one, which is one of them; None: all.

    Raises:
        DeadlineExceeded: a rank does not open it in time.
    """
    ranks = range(world.size) if ranks is None else ranks
    with ExitStack() as files:
        own, name = None, f"ktrainer-{secrets.token_hex(8)}"
        with suppress(OSError, AttributeError):  # not on Linux; no memory
            own = os.memfd_create(name)
            files.callback(os.close, own)
            os.ftruncate(own, _BUFFERS * PIECE_BYTES)
        path = f"/proc/{os.getpid()}/fd/{own}"
        every = world.allgather((path, name), "open shared memory")
        opened = [_open_memory(*every[rank]) for rank in ranks] if _few(ranks) else []
        mapped = [np.frombuffer(memory, np.uint8) for memory in opened if memory is not None]
        everywhere = world.allgather(len(mapped) == len(ranks), "open shared memory")
    return SharedMemory(world, comm, mapped) if all(everywhere[rank] for rank in ranks) else None


def _few(ranks: Sequence[int]) -> bool:
    return 1 < len(ranks) <= MOST_RANKS


def _open_memory(path: str, name: str) -> mmap.mmap | None:
    """Map the memory of a rank; None if `path` is not that: the rank runs somewhere else."""
    try:
        if name not in os.readlink(path):
            return None
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return mmap.mmap(file, _BUFFERS * PIECE_BYTES)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
