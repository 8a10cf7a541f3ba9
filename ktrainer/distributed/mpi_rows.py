"""Rows of all ranks, gathered into one array or exchanged between all pairs of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ktrainer.distributed.mpi_communicator import MpiComm


def gather_rows(
    world: MpiComm,
    comm: MPI.Intracomm,
    array: np.ndarray,
    rows: np.ndarray,
    what: str = "all-gather of sparse gradients",
) -> np.ndarray:
    """The rows of all ranks, ordered by rank.

    Args:
        world: waits, with its deadline.
        comm: the communicator to use, of the ranks of `world`.
        array: this rank's rows; the other dimensions are the same on every rank.
        rows: int64; how many rows each rank has.
        what: names the operation, should its deadline pass.
    """
    gathered = np.empty((int(rows.sum()), *array.shape[1:]), array.dtype)
    send, starts = _bytes(np.ascontiguousarray(array)), _starts(rows)
    with _row_of(array) as row:
        received: Any = [_bytes(gathered), (rows, starts), row]
        request = comm.Iallgatherv([send, len(array), row], received)
    world.wait(request, what, send, gathered, rows, starts)
    return gathered


def exchange_rows(
    world: MpiComm, array: np.ndarray, splits: np.ndarray, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Send `splits[r]` rows of `array` to each rank r; rows of rank 0 come first in what arrives.

    Returns:
        The rows that have arrived, and how many came from each rank.
    """
    counts = np.empty_like(splits)
    world.wait(world.comm.Ialltoall(splits, counts), what, splits, counts)
    arrived = np.empty((int(counts.sum()), *array.shape[1:]), array.dtype)
    send, ours, theirs = _bytes(np.ascontiguousarray(array)), _starts(splits), _starts(counts)
    with _row_of(array) as row:
        request = world.comm.Ialltoallv(
            [send, (splits, ours), row], [_bytes(arrived), (counts, theirs), row]
        )
    world.wait(request, what, send, arrived, splits, ours, counts, theirs)
    return arrived, counts


@contextmanager
def _row_of(array: np.ndarray) -> Iterator[MPI.Datatype]:
    """The type of a row's bytes: MPI counts in 32 bits, which bytes of many rows exceed. It keeps a
    freed type until what was begun with it has ended."""
    row = MPI.BYTE.Create_contiguous(array.dtype.itemsize * int(np.prod(array.shape[1:])))
    row.Commit()
    try:
        yield row
    finally:
        row.Free()


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _starts(rows: np.ndarray) -> np.ndarray:
    """The first row of each rank."""
    return np.concatenate([[0], np.cumsum(rows)[:-1]])
