"""Rows of all ranks, gathered into one array or exchanged between all pairs of ranks."""

from __future__ import annotations

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
    lengths, starts = _spans(rows, array)
    send = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    spec: Any = [gathered.reshape(-1).view(np.uint8), (lengths, starts), MPI.BYTE]
    world.wait(comm.Iallgatherv(send, spec), what, send, gathered, starts, lengths)
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
    send = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ours, theirs = _spans(splits, array), _spans(counts, array)
    request = world.comm.Ialltoallv(
        [send, ours, MPI.BYTE], [arrived.reshape(-1).view(np.uint8), theirs, MPI.BYTE]
    )
    world.wait(request, what, send, arrived, *ours, *theirs)
    return arrived, counts


def _spans(rows: np.ndarray, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Length and start of each rank's rows, in bytes."""
    lengths = rows * (array.dtype.itemsize * int(np.prod(array.shape[1:])))
    return lengths, np.concatenate([[0], np.cumsum(lengths)[:-1]])
