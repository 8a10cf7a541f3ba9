"""The world of processes that `horovodrun` started without MPI: Horovod carries host data too."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.world.base import ReduceOp, World, for_reduction
from ktrainer.world.horovod_sets import initialised_horovod


class HorovodWorld(World):
    """Horovod's ranks. Host messages have names of their own, apart from the gradients'."""

    name = "horovod"

    def __init__(self, deadline: float = 300.0) -> None:
        self.deadline = deadline
        self._hvd = initialised_horovod(deadline)  # reads its own limits once, now
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()
        # Horovod's calls block without end; in a thread of its own a call can be given up.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "ktrainer-horovod")
        self._count = 0
        _end_with_an_uncaught_exception()

    def _wait(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._count += 1  # the same on every rank: host messages are made in one order
        future = self._pool.submit(call, *args, name=f"oob.{self._count}", **kwargs)
        try:
            return future.result(self.deadline)
        except concurrent.futures.TimeoutError:
            raise DeadlineExceeded(self.rank, self.step, what, self.deadline) from None
        except tf.errors.OpError as error:
            if "Horovod has been shut down" not in str(error):
                raise
            raise PeerLost(
                f"rank {self.rank} lost a peer at step {self.step} in {what!r}: {error}"
            ) from error

    def barrier(self, what: str = "barrier") -> None:
        self.oob_allreduce(np.int32(0), "sum", what)

    def broadcast(self, value: Any, root: int = 0, what: str = "broadcast") -> Any:
        if isinstance(value, np.ndarray):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            result = self._wait(what, self._hvd.broadcast, data, root_rank=root)
            return result.numpy().view(value.dtype).reshape(value.shape)
        if isinstance(value, list) and value and all(isinstance(v, np.ndarray) for v in value):
            return [self.broadcast(v, root, what) for v in value]
        data = np.frombuffer(pickle.dumps(value if self.rank == root else None), np.uint8)
        length = self.broadcast(np.array([data.size], np.int64), root, what)
        buffer = data if self.rank == root else np.zeros(int(length[0]), np.uint8)
        return pickle.loads(self.broadcast(buffer.copy(), root, what).tobytes())

    def allgather(self, value: Any, what: str = "allgather") -> list[Any]:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self._wait(what, self._hvd.allgather, np.array([data.size], np.int64)).numpy()
        gathered = self._wait(what, self._hvd.allgather, data).numpy()
        ends = np.cumsum(lengths)
        return [
            pickle.loads(gathered[end - length : end].tobytes())
            for end, length in zip(ends, lengths, strict=True)
        ]

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        array, dtype = for_reduction(value, op)
        ops = {"sum": "Sum", "average": "Average", "min": "Min", "max": "Max"}
        operation = getattr(self._hvd, ops[op])
        result = self._wait(what, self._hvd.allreduce, array.reshape(-1), op=operation)
        return result.numpy().reshape(np.shape(value)).astype(dtype, copy=False)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _end_with_an_uncaught_exception() -> None:
    """An exception that nobody catches ends this process, and `horovodrun` then all others.

    Otherwise the interpreter would wait at its exit for a call that was given up.
    """
    report = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = end
