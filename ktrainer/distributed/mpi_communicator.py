"""One MPI communicator: collectives with deadlines, groups of its ranks, messages from any thread.

Waits poll non-blocking requests: that costs about a microsecond and lets every wait have a
deadline.
"""

from __future__ import annotations

import ctypes
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from ktrainer.distributed import mpi_chunks
from ktrainer.distributed.deadlines import call_with_deadline
from ktrainer.distributed.mpi_progress import has_completed, receive_any, send
from ktrainer.distributed.world import ReduceOp, World, for_reduction
from ktrainer.errors import name_ranks

T = TypeVar("T")
_OPS = {"sum": MPI.SUM, "average": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}

# What MPI may still use: requests that were not waited for to their end, and their memory.
_kept: list[Any] = []
# MPI ends after Python's objects do: the list is never freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))


def keep_for_mpi(*objects: Any) -> None:
    """Keep requests, or what holds them, and their memory, for as long as MPI may use it: for good.

    Requests of reductions and of `Iallgatherv` do not keep their buffers themselves (mpi4py 4.1).
    """
    _kept.append(objects)


def keeps_requests() -> bool:
    """Return whether this process has requests that were not waited for to their end."""
    return bool(_kept)


class MpiComm(World):
    """The ranks of a communicator that carries no other messages."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._owners: WeakSet[Any] = WeakSet()
        self.rank, self.size = comm.rank, comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator; callers may post requests of their own on it and `wait` for them. Where
        there are several at a time, see `keep_if_interrupted`.

        Raises:
            WorldError: a wait has been interrupted.
        """
        self.check_usable()
        return self._comm

    def record_interruption(self, error: BaseException) -> None:
        super().record_interruption(error)
        if self.interrupted_by is not None:
            keep_for_mpi(*self._owners)

    def keep_if_interrupted(self, owner: Any) -> None:
        self._owners.add(owner)

    def keep_unfinished(self, request: Any, *buffers: Any) -> None:
        """Keep a request that the exception under way leaves unfinished, and its buffers; note that
        this exception has interrupted the wait for it."""
        self.record_interruption(cast(BaseException, sys.exception()))
        keep_for_mpi(request, *buffers)

    @abstractmethod
    def wait(self, request: Any, what: str, *buffers: Any) -> None:
        """Wait for an MPI request, at most `deadline` seconds.

        Args:
            buffers: of a collective, and other objects that MPI writes to, kept as long as MPI may
                use them; requests between two ranks keep their own.

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
        array, result_of = for_reduction(value, op)
        result = np.empty_like(array)
        self.wait(self.comm.Iallreduce(array, result, _OPS[op]), what, array, result)
        if op == "average":
            result = result / array.dtype.type(self.size)
        return result_of(result)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of the same ranks, for messages that must stay apart from others.

        Raises:
            DeadlineExceeded: a rank does not open it.
        """
        copy, request = self.comm.Idup()
        self.wait(request, "open a communicator", copy)  # MPI fills in its handle at the end
        return copy

    def call(self, call: Callable[[], T], what: str) -> T:
        """The result of a blocking call of MPI, which has the deadline of waits.

        Raises:
            DeadlineExceeded: naming rank, step and `what`.
        """
        return call_with_deadline(self, call, what)

    def watch(self, comm: MPI.Intracomm) -> None:
        """Register `comm` to be revoked too when a rank of this world is lost."""

    def close(self) -> None:
        self.free(self._comm)

    def free(self, comm: MPI.Intracomm) -> None:
        """Free a communicator of this world's ranks, unless a wait has been interrupted: Open MPI
        crashes when a request makes progress on what was freed. May be called twice, and after MPI
        has ended."""
        usable = self.interrupted_by is None and not MPI.Is_finalized()
        if usable and comm != MPI.COMM_NULL:
            comm.Free()


class MpiGroup(MpiComm):
    """Some ranks of a world, with a communicator of their own; made by `MpiWorld.group`.

    `rank` and `size`, roots and the order of gathered values are those within the group. Waits are
    the world's: they have its deadline and step, and their errors name its ranks.
    """

    def __init__(
        self, world: MpiComm, comm: MPI.Intracomm, ranks: Sequence[int], label: str
    ) -> None:
        super().__init__(comm)
        self._world, self._label = world, label
        self.switch(comm, ranks)

    def switch(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        """Use another communicator from now on: ranks of the world were lost, or have joined.

        Args:
            ranks: those of `comm` in the world.
        """
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._ranks = tuple(ranks)
        self._among = f"{self._label} ({name_ranks(self._ranks)})"

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether this process has yet to join the others of the world."""
        return self._world.alone

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
        self.watch(copy)
        return copy

    def call(self, call: Callable[[], T], what: str) -> T:
        return self._world.call(call, f"{what} among {self._among}")

    def watch(self, comm: MPI.Intracomm) -> None:
        self._world.watch(comm)

    @property
    def interrupted_by(self) -> BaseException | None:  # type: ignore[override]
        """The error that interrupted a wait of the world."""
        return self._world.interrupted_by

    def record_interruption(self, error: BaseException) -> None:
        self._world.record_interruption(error)

    def check_usable(self) -> None:
        self._world.check_usable()

    def keep_if_interrupted(self, owner: Any) -> None:
        self._world.keep_if_interrupted(owner)

    def wait(self, request: Any, what: str, *buffers: Any) -> None:
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
        world.keep_if_interrupted(self)
        self._sent: list[MPI.Request] = []  # a dropped request may lose its message

    def send(self, value: Any, rank: int) -> None:
        """Send a picklable `value` to a rank of the world."""
        self._sent.append(send(self._comm, value, rank, 0))

    def take(self) -> list[tuple[int, Any]]:
        """(rank, value) of the messages that have arrived, in the order of arrival."""
        found = []
        while message := receive_any(self._comm, 0):
            found.append(message)
        return found

    def all_taken(self) -> bool:
        """Return whether all that was sent has left this rank."""
        self._sent = [request for request in self._sent if not has_completed(request)]
        return not self._sent

    def close(self) -> None:
        """Free the communicator. All ranks call it together; may be called twice."""
        usable = self._world.interrupted_by is None and not MPI.Is_finalized()
        if usable and self._comm != MPI.COMM_NULL:
            self._world.barrier("close a mailbox")  # has a deadline, which `Free` lacks
            self._world.free(self._comm)
