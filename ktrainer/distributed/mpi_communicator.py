"""One MPI communicator: collectives with deadlines, groups of its ranks, messages from any thread.

Waits poll non-blocking requests: that costs about a microsecond and lets every wait have a
deadline.
"""

from __future__ import annotations

import atexit
import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ktrainer.distributed import mpi_chunks
from ktrainer.distributed.world import ReduceOp, World, for_reduction

_OPS = {"sum": MPI.SUM, "average": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}

# Requests whose waits have ended at a deadline, with their buffers.
given_up: list[tuple[MPI.Request, tuple[np.ndarray, ...]]] = []


def give_up(request: MPI.Request, *buffers: np.ndarray) -> None:
    """Keep a request that is no longer waited for, and its buffers: MPI may still use them, and
    collectives' requests do not keep theirs."""
    has_outstanding()  # forgets those that MPI has finished since
    given_up.append((request, buffers))


def has_outstanding() -> bool:
    """Return whether MPI has not finished requests that were given up."""
    given_up[:] = [each for each in given_up if not _has_ended(each[0])]
    return bool(given_up)


@atexit.register
def _outlive_python() -> None:
    """Leave buffers to MPI, which ends after Python's objects do."""
    for each in given_up:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def free(comm: MPI.Intracomm, world: MpiComm) -> None:
    """Free a communicator of a world, unless requests of that world were given up: Open MPI crashes
    when one makes progress on what was freed. May be called twice, and after MPI has ended."""
    if comm != MPI.COMM_NULL and not MPI.Is_finalized() and not world.gave_up:
        comm.Free()


def _has_ended(request: MPI.Request) -> bool:
    try:
        return bool(request.Test())
    except MPI.Exception:  # it has failed
        return True


class MpiComm(World):
    """The ranks of a communicator that carries no other messages.

    Attributes:
        comm: the communicator; callers may post requests of their own on it and `wait` for them.
        gave_up: whether a wait has ended at its deadline.
    """

    name = "mpi"
    gave_up = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()

    @abstractmethod
    def wait(self, request: Any, what: str, *buffers: np.ndarray) -> None:
        """Wait for an MPI request, at most `deadline` seconds.

        Args:
            buffers: of a collective; kept as long as MPI may use them.

        Raises:
            DeadlineExceeded: naming rank, step and `what`.
            PeerLost: MPI reported a failed peer.
        """

    def barrier(self, what: str = "barrier") -> None:
        self.wait(self.comm.Ibarrier(), what)

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        if isinstance(value, np.ndarray):
            return self._broadcast_array(value, root, what)
        if isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            return [self._broadcast_array(v, root, what) for v in value]
        data = np.frombuffer(MPI.pickle.dumps(value), np.uint8) if self.rank == root else None
        length = np.array([0 if data is None else data.size], np.int64)
        self.wait(self.comm.Ibcast(length, root), what, length)
        buffer = np.empty(int(length[0]), np.uint8) if data is None else data.copy()
        self._broadcast_bytes(buffer, root, what)
        return value if self.rank == root else MPI.pickle.loads(buffer.tobytes())

    def _broadcast_array(self, value: np.ndarray, root: int, what: str) -> np.ndarray:
        # Bytes: MPI need not know the element type (bfloat16, float16, bool, ...).
        buffer = np.array(value, order="C", copy=True)
        self._broadcast_bytes(buffer.reshape(-1).view(np.uint8), root, what)
        return buffer

    def _broadcast_bytes(self, buffer: np.ndarray, root: int, what: str) -> None:
        for piece in mpi_chunks.pieces(buffer):
            self.wait(self.comm.Ibcast(piece, root), what, piece)

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        data = np.frombuffer(MPI.pickle.dumps(value), np.uint8)
        lengths = np.empty(self.size, np.int64)
        mine = np.array([data.size], np.int64)
        self.wait(self.comm.Iallgather(mine, lengths), what, mine, lengths)
        gathered = np.empty(int(lengths.sum()), np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        parts = [gathered[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        if gathered.size <= mpi_chunks.MOST_BYTES:
            spec = cast(Any, [gathered, (lengths, starts), MPI.BYTE])
            self.wait(self.comm.Iallgatherv(data, spec), what, data, gathered, starts, lengths)
        else:  # too much for one message: each rank's in turn, in chunks
            parts[self.rank][:] = data
            for root, part in enumerate(parts):
                self._broadcast_bytes(part, root, what)
        return [MPI.pickle.loads(part.tobytes()) for part in parts]

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array, dtype = for_reduction(value, op)
        result = np.empty_like(array)
        self.wait(self.comm.Iallreduce(array, result, _OPS[op]), what, array, result)
        if op == "average":
            result = result / array.dtype.type(self.size)
        return result.reshape(np.shape(value)).astype(dtype, copy=False)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of the same ranks, for messages that must stay apart from others.

        Raises:
            DeadlineExceeded: a rank does not open it.
        """
        copy, request = self.comm.Idup()
        self.wait(request, "open a communicator")
        return copy

    def watch(self, comm: MPI.Intracomm) -> None:
        """Register `comm` to be revoked too when a rank of this world is lost."""

    def close(self) -> None:
        free(self.comm, self)


class MpiGroup(MpiComm):
    """Some ranks of a world, with a communicator of their own; made by `MpiWorld.group`.

    `rank` and `size`, roots and the order of gathered values are those within the group. Waits are
    the world's: they have its deadline and step, and their errors name its ranks.
    """

    def __init__(
        self, world: MpiComm, comm: MPI.Intracomm, ranks: Sequence[int], label: str
    ) -> None:
        super().__init__(comm)
        self._ranks = tuple(ranks)
        self._world = world
        plural = "s" if self.size > 1 else ""
        self._among = f"{label} (rank{plural} {', '.join(map(str, ranks))})"

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    # Read from the world at each use: its loop counts steps, its user may change the deadline.
    @property
    def step(self) -> int:  # type: ignore[override]
        """The global step of the world."""
        return self._world.step

    @property
    def deadline(self) -> float:  # type: ignore[override]
        """Seconds that any wait may last, in the world."""
        return self._world.deadline

    def duplicate(self) -> MPI.Intracomm:
        copy = super().duplicate()
        self._world.watch(copy)
        return copy

    @property
    def gave_up(self) -> bool:  # type: ignore[override]
        """Whether a wait of the world that this is a group of has ended at its deadline."""
        return self._world.gave_up

    def wait(self, request: Any, what: str, *buffers: np.ndarray) -> None:
        self._world.wait(request, f"{what} among {self._among}", *buffers)


class Mailbox:
    """Messages between the ranks of a world that any thread may send and take.

    They have a communicator of their own, so other threads may be in collectives meanwhile. Nothing
    here waits: callers poll, with a deadline of their own.

    Args:
        world: all of its ranks must make the mailbox at the same time, and close it together.

    Raises:
        DeadlineExceeded: a rank does not make it, or close it, in time.
    """

    def __init__(self, world: MpiComm) -> None:
        self._world, self._comm = world, world.duplicate()
        self._sent: list[MPI.Request] = []  # a dropped request may lose its message

    def send(self, value: Any, rank: int) -> None:
        """Send a picklable `value` to a rank of the world."""
        self._sent.append(self._comm.isend(value, rank, 0))

    def take(self) -> list[tuple[int, Any]]:
        """(rank, value) of the messages that have arrived, in the order of arrival."""
        found = []
        # Matched probes: another thread of this rank cannot take the message in between.
        while message := self._comm.improbe(MPI.ANY_SOURCE, 0):
            status = MPI.Status()
            value = message.recv(status)
            found.append((status.Get_source(), value))
        return found

    def all_taken(self) -> bool:
        """Return whether all that was sent has left this rank."""
        self._sent = [request for request in self._sent if not request.Test()]
        return not self._sent

    def close(self) -> None:
        """Free the communicator. All ranks call it together; may be called twice."""
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._world.barrier("close a mailbox")  # has a deadline, which `Free` lacks
            free(self._comm, self._world)
