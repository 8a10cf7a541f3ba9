"""The world of processes that MPI started.

Each use has a communicator of its own, duplicated from `COMM_WORLD`, so that host messages and
gradients can be under way at once without being mistaken for one another. Waits poll
non-blocking requests: that costs about a microsecond and lets every wait have a deadline.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ktrainer.errors import DeadlineExceeded, PeerLost, WorldError
from ktrainer.world.base import ReduceOp, World, for_reduction

_OPS = {"sum": MPI.SUM, "average": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
_SPIN_SECONDS = 0.002  # poll without sleeping at first: most waits are microseconds


class MpiWorld(World):
    """Ranks of `MPI.COMM_WORLD`, talking through a communicator of their own."""

    name = "mpi"

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which gradients and host "
                "messages that overlap need; start the script through `ktrainer launch`, or "
                "leave mpi4py.rc.thread_level at 'multiple'"
            )
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        _end_all_with_this_rank()

    def wait(self, request: Any, what: str) -> None:
        """Wait for an MPI request, at most `deadline` seconds.

        Raises:
            DeadlineExceeded: naming rank, step and `what`.
            PeerLost: MPI reported a failed peer.
        """
        start = time.monotonic()
        try:
            while not request.Test():
                waited = time.monotonic() - start
                if waited > self.deadline:
                    raise DeadlineExceeded(self.rank, self.step, what, self.deadline)
                if waited > _SPIN_SECONDS:
                    time.sleep(50e-6)
                else:
                    os.sched_yield()
        except MPI.Exception as error:
            raise PeerLost(
                f"rank {self.rank} lost a peer at step {self.step} in {what!r}: {error}"
            ) from error

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
        self.wait(self.comm.Ibcast(buffer, root), what)
        return value if self.rank == root else _loads(buffer.tobytes())

    def _broadcast_array(self, value: np.ndarray, root: int, what: str) -> np.ndarray:
        # Bytes: MPI need not know the element type (bfloat16, float16, bool, ...).
        buffer = np.array(value, order="C", copy=True)
        self.wait(self.comm.Ibcast(buffer.reshape(-1).view(np.uint8), root), what)
        return buffer

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        data = np.frombuffer(_dumps(value), np.uint8)
        lengths = np.empty(self.size, np.int64)
        self.wait(self.comm.Iallgather(np.array([data.size], np.int64), lengths), what)
        gathered = np.empty(int(lengths.sum()), np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        spec = cast(Any, [gathered, (lengths, starts), MPI.BYTE])
        self.wait(self.comm.Iallgatherv(data, spec), what)
        return [
            _loads(gathered[start : start + length].tobytes())
            for start, length in zip(starts, lengths, strict=True)
        ]

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array, dtype = for_reduction(value, op)
        result = np.empty_like(array)
        self.wait(self.comm.Iallreduce(array, result, _OPS[op]), what)
        if op == "average":
            result = result / array.dtype.type(self.size)
        return result.reshape(np.shape(value)).astype(dtype, copy=False)

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self.comm.Free()


def _dumps(value: Any) -> bytes:
    return MPI.pickle.dumps(value)


def _loads(data: bytes) -> Any:
    return MPI.pickle.loads(data)


def _end_all_with_this_rank() -> None:
    """An exception that nobody catches on one rank ends all of them.

    Otherwise the interpreter would end in MPI_Finalize, which waits for the others for ever.
    """
    report = sys.excepthook

    def end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = end_all
