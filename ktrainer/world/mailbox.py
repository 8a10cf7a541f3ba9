"""Messages that any thread may send and take, while other threads are in collectives."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from ktrainer.world.mpi_comm import MpiComm

_TAG = 0


class Mailbox:
    """Messages between the ranks of a world, over a communicator of their own.

    Nothing here waits: whoever waits for a message looks again, and has a deadline of his own.

    Args:
        world: all of its ranks must make the mailbox at the same time, and close it so.

    Raises:
        DeadlineExceeded: a rank does not come to make it, or to close it.
    """

    def __init__(self, world: MpiComm) -> None:
        self._world, self._comm = world, world.duplicate()
        self._sent: list[MPI.Request] = []  # a request that is let go of may lose its message

    def send(self, value: Any, rank: int) -> None:
        """Send a picklable `value` to a rank of the world."""
        self._sent.append(self._comm.isend(value, rank, _TAG))

    def take(self) -> list[tuple[int, Any]]:
        """(rank, value) of the messages that have come, in the order of their coming."""
        found = []
        # Matched probes: another thread of this rank cannot take the message in between.
        while message := self._comm.improbe(MPI.ANY_SOURCE, _TAG):
            status = MPI.Status()
            value = message.recv(status)
            found.append((status.Get_source(), value))
        return found

    def all_taken(self) -> bool:
        """Whether all that was sent has left this rank."""
        self._sent = [request for request in self._sent if not request.Test()]
        return not self._sent

    def close(self) -> None:
        """Let go of the communicator. All ranks call it together; may be called twice."""
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._world.barrier("close a mailbox")  # which has a deadline; `Free` has none
            self._comm.Free()
