"""Sum arrays and gather rows among ranks of one host, through memory that all of them have mapped.

Each rank has a part of it: several buffers of 2 MiB, used in turn. An array is summed 2 MiB at a
time; with two ranks each step passes over half of that:

    each rank writes the others' segments of its array, weighted, to a buffer of its part
    barrier
    it adds up its own segment, read from the buffers of all ranks in order, and writes the sum
    barrier
    it reads the other segments' sums

Rows are gathered with one barrier for each 2 MiB: each rank writes its own, and reads those of all.

Messages between two processes would copy each byte once more.

All ranks make the same calls, and use the buffers in the same order. Before a rank writes to a
buffer again, it has passed a barrier that the others enter only after reading that buffer.
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
    segments_of,
    weigh,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from ktrainer.distributed.mpi_communicator import MpiComm

# Two suffice to be correct. Four are faster where cores share no cache: writing to memory that
# another core has just read takes up to six times as long, until it has left that core's caches.
# Where cores share one, sums of several MiB take a sixth longer than with two. More than four take
# too much memory: ranks map each other's, and tests/pipeline/test_memory.py sets a limit.
_BUFFERS = 4
_ALIGNMENT = 64  # bytes; TensorFlow copies arrays that do not begin at a multiple of it


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

    def sum_in_place(self, array: np.ndarray, what: str, weight: float = 1.0) -> None:
        """Replace a flat array by its weighted sum over ranks, with the bits of `sum_in_place` by
        messages.

        Args:
            array: contiguous; of the same length and dtype on all ranks.
            what: what is summed, for messages.
            weight: of this rank's array, of its dtype.
        """
        length = PIECE_BYTES // array.itemsize
        for start in range(0, array.size, length):
            self._sum_piece(array[start : start + length], f"all-reduce of {what}", weight)

    def _sum_piece(self, array: np.ndarray, what: str, weight: float) -> None:
        rank = self._comm.rank
        parts = [part[: array.nbytes].view(array.dtype) for part in next(self._buffers)]
        segments = segments_of(array, len(parts))
        shared = [segments_of(part, len(parts)) for part in parts]
        others = [each for each in range(len(parts)) if each != rank]
        for other in others:
            weigh(segments[other], weight, to=shared[rank][other])
        weigh(segments[rank], weight)
        self._world.wait(self._comm.Ibarrier(), what)
        addends = [mine[rank] for mine in shared]
        addends[rank] = segments[rank]
        add_up(segments[rank], addends)
        shared[rank][rank][:] = segments[rank]
        self._world.wait(self._comm.Ibarrier(), what)
        for other in others:
            segments[other][:] = shared[other][other]

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
    """How many rows of all `arrays` a rank writes at once, a multiple of 64 so that each array's
    place is aligned; 0 if 64 rows do not fit into a buffer."""
    row = max(1, sum(map(_row_bytes, arrays)))
    return (PIECE_BYTES - _ALIGNMENT) // row // _ALIGNMENT * _ALIGNMENT


def _row_bytes(array: np.ndarray) -> int:
    return array.dtype.itemsize * math.prod(array.shape[1:])


def _places_of_rows(part: np.ndarray, arrays: Sequence[np.ndarray], rows: int) -> Views:
    """Where a rank writes its number of rows, and so many rows of each array."""
    sizes = [rows * _row_bytes(array) for array in arrays]
    starts = np.cumsum([_ALIGNMENT, *sizes])  # what is before them is for the number
    return [
        part[:8].view(np.int64),
        *(
            part[start : start + size].view(array.dtype).reshape(rows, *array.shape[1:])
            for start, size, array in zip(starts[:-1], sizes, arrays, strict=True)
        ),
    ]


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An array in memory that TensorFlow takes as a tensor's without copying it."""
    nbytes = math.prod(shape) * dtype.itemsize
    space = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -space.ctypes.data % _ALIGNMENT
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
        few = 1 < len(ranks) <= MOST_RANKS
        opened = [_open_memory(*every[rank]) for rank in ranks] if few else []
        mapped = [np.frombuffer(memory, np.uint8) for memory in opened if memory is not None]
        everywhere = world.allgather(len(mapped) == len(ranks), "open shared memory")
    return SharedMemory(world, comm, mapped) if all(everywhere[rank] for rank in ranks) else None


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
