"""Horovod: its start, its process sets, and the world of processes that `horovodrun` started.

Horovod calls a group of ranks that sum among themselves a process set. It must be told of all sets
when it starts, on every rank in the same order. (It can add some later, under
HOROVOD_DYNAMIC_PROCESS_SETS=1; then its background threads ask each other in every cycle whether
there is a new one.) Sets that are requested while it runs make it start again.
"""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.distributed.world import ReduceOp, World, for_reduction
from ktrainer.errors import DeadlineExceeded, PeerLost

_settings: dict[str, str] = {}  # variables that Horovod reads when it starts
_sets: dict[tuple[int, ...], Any] = {}  # of this process's Horovod, in the order of their ids


class HorovodWorld(World):
    """Ranks started by `horovodrun` without MPI: Horovod carries host data too.

    Host messages have names of their own, apart from the gradients'.
    """

    name = "horovod"

    def __init__(self, deadline: float = 300.0) -> None:
        self.deadline = deadline
        self._hvd = initialised_horovod(deadline)  # reads its own limits once, now
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.local_rank, self.local_size = self._hvd.local_rank(), self._hvd.local_size()
        # Horovod's calls block without end; in a thread of its own a call can be abandoned.
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "ktrainer-horovod")
        self._count = 0
        _end_with_an_uncaught_exception()

    def _wait(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.check_usable()
        try:
            with self.waiting():
                return self._result(what, call, *args, **kwargs)
        except BaseException as error:  # other ranks make the rest of this operation's messages
            self.record_interruption(error)
            raise

    def _result(self, what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
        array, result_of = for_reduction(value, op)
        ops = {"sum": "Sum", "average": "Average", "min": "Min", "max": "Max"}
        operation = getattr(self._hvd, ops[op])
        result = self._wait(what, self._hvd.allreduce, array.reshape(-1), op=operation)
        return result_of(result.numpy())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _end_with_an_uncaught_exception() -> None:
    """End this process on an uncaught exception; `horovodrun` then ends all others.

    Otherwise the interpreter would wait at its exit for an abandoned call.
    """
    report = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = end


def ask_for_hierarchical_sums() -> None:
    """Let Horovod, once it starts, sum with NCCL within each host and with MPI between hosts. A
    Horovod without NCCL ignores that."""
    _settings["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"


def initialised_horovod(deadline: float = 300.0, sets: Sequence[Any] = ()) -> Any:
    """The module `horovod.tensorflow`, initialised once.

    Args:
        deadline: seconds after which Horovod gives up a tensor that some rank did not submit.
        sets: the process sets that it starts with, if it does start.
    """
    import horovod.tensorflow as hvd

    if not hvd.is_initialized():
        limits = {
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(deadline / 2))),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(1, int(deadline))),
            **_settings,
        }
        added = {key: value for key, value in limits.items() if key not in os.environ}
        os.environ.update(added)
        try:
            hvd.init(process_sets=list(sets))  # reads the limits once
        finally:
            for key in added:
                del os.environ[key]
    return hvd


def process_set_of(world: World, ranks: Sequence[int], all_groups: Sequence[Sequence[int]]) -> Any:
    """The process set of `ranks`. All ranks of `world` call it together.

    Args:
        world: the processes; Horovod must see the same ones.
        ranks: two at least, this one among them.
        all_groups: the groups of all ranks, in the same order on every rank.

    Raises:
        ValueError: `ranks` is not one of the groups, or has a single rank.
    """
    groups = [tuple(sorted(int(rank) for rank in group)) for group in all_groups]
    mine = tuple(sorted(int(rank) for rank in ranks))
    if mine not in groups or world.rank not in mine or len(mine) < 2:
        raise ValueError(
            f"rank {world.rank} cannot sum over ranks {list(mine)}: they must be two or more, this "
            f"one among them, and one of the groups {[list(group) for group in groups]}"
        )
    hvd = _started_with(world, [group for group in groups if 1 < len(group) < world.size])
    return hvd.global_process_set if len(mine) == world.size else _sets[mine]


def _started_with(world: World, groups: Sequence[tuple[int, ...]]) -> Any:
    """Horovod, knowing of `groups` and of all sets from before, which keep their numbers."""
    import horovod.tensorflow as hvd

    running = hvd.is_initialized()
    if not running or any(group not in _sets for group in groups):
        for group in groups:
            _sets.setdefault(group, hvd.ProcessSet(list(group)))
        # A rank that stops stops Horovod on all of them: first all must have seen it running.
        world.barrier("start Horovod with process sets")
        if running:
            hvd.shutdown()
    return initialised_horovod(world.deadline, list(_sets.values()))
