"""Collectives on one MPI communicator, for the whole world and for groups of its ranks.

Waits poll non-blocking requests: that costs about a microsecond and lets every wait have a
deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ktrainer.world import chunks
from ktrainer.world.base import ReduceOp, World, for_reduction

_OPS = {"sum": MPI.SUM, "average": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}


class MpiComm(World):
    """The ranks of `comm`, which nobody else talks through.

    Attributes:
        comm: the communicator; for messages of one's own, which `wait` then waits for.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()

    @abstractmethod
    def wait(self, request: Any, what: str) -> None:
        """Wait for an MPI request, at most `deadline` seconds.

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
        data = np.frombuffer(_dumps(value), np.uint8) if self.rank == root else None
        length = np.array([0 if data is None else data.size], np.int64)
        self.wait(self.comm.Ibcast(length, root), what)
        buffer = np.empty(int(length[0]), np.uint8) if data is None else data.copy()
        self._broadcast_bytes(buffer, root, what)
        return value if self.rank == root else _loads(buffer.tobytes())

    def _broadcast_array(self, value: np.ndarray, root: int, what: str) -> np.ndarray:
        # Bytes: MPI need not know the element type (bfloat16, float16, bool, ...).
        buffer = np.array(value, order="C", copy=True)
        self._broadcast_bytes(buffer.reshape(-1).view(np.uint8), root, what)
        return buffer

    def _broadcast_bytes(self, buffer: np.ndarray, root: int, what: str) -> None:
        for piece in chunks.pieces(buffer):
            self.wait(self.comm.Ibcast(piece, root), what)

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        data = np.frombuffer(_dumps(value), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.wait(self.comm.Iallgather(np.array([data.size], np.int64), lengths), what)
        gathered = np.empty(int(lengths.sum()), np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        parts = [gathered[s : s + n] for s, n in zip(starts, lengths, strict=True)]
        if gathered.size <= chunks.MOST_BYTES:
            spec = cast(Any, [gathered, (lengths, starts), MPI.BYTE])
            self.wait(self.comm.Iallgatherv(data, spec), what)
        else:  # too much for one message: each rank's in turn, in pieces
            parts[self.rank][:] = data
            for root, part in enumerate(parts):
                self._broadcast_bytes(part, root, what)
        return [_loads(part.tobytes()) for part in parts]

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array, dtype = for_reduction(value, op)
        result = np.empty_like(array)
        self.wait(self.comm.Iallreduce(array, result, _OPS[op]), what)
        if op == "average":
            result = result / array.dtype.type(self.size)
        return result.reshape(np.shape(value)).astype(dtype, copy=False)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of the same ranks, for messages that must not meet others.

        Raises:
            DeadlineExceeded: a rank does not come to open it.
        """
        copy, request = self.comm.Idup()
        self.wait(request, "open a communicator")
        return copy

    def watch(self, comm: MPI.Intracomm) -> None:
        """Ranks of this world wait in `comm` too: when one dies, they are to leave it."""

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self.comm.Free()


def _dumps(value: Any) -> bytes:
    return MPI.pickle.dumps(value)


def _loads(data: bytes) -> Any:
    return MPI.pickle.loads(data)
