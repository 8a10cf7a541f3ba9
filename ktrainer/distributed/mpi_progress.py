"""Calls in which MPI makes progress, by one thread of a process at a time.

Open MPI 5.0's agreements (`Iagree`) do not bear that two threads are in such calls: one in some
thousand then returns zero on all ranks, as if a rank had asked to heal, though none is lost.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_one_thread = threading.RLock()


def has_completed(request: Any) -> bool:
    """`request.Test()`."""
    with _one_thread:
        completed: bool = request.Test()
    return completed


def receive_any(comm: Any, tag: int) -> tuple[int, Any] | None:
    """(rank, value) of a message that has arrived; None: there is none."""
    from mpi4py import MPI  # starts MPI, which pipelines of one process do without

    with _one_thread:
        # A matched probe: another thread of this rank cannot take the message in between.
        message = comm.improbe(MPI.ANY_SOURCE, tag)
        if message is None:
            return None
        status = MPI.Status()
        value = message.recv(status)
        return status.Get_source(), value


def start_agreement(comm: Any, flag: np.ndarray) -> Any:
    """`comm.Iagree(flag)`; returns the request."""
    with _one_thread:
        return comm.Iagree(flag)


def send(comm: Any, value: Any, to: int, tag: int) -> Any:
    """`comm.isend(value, to, tag)`; returns the request."""
    with _one_thread:
        return comm.isend(value, to, tag)
