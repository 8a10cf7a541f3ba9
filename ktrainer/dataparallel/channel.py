"""Channels: one order of collective calls among the ranks of a process set.

Before each call the ranks compare digests of what they are about to do, in one message of 32 bytes.
Ranks in different calls get an error that names both, instead of each other's numbers. The same
message tells of ranks that have joined (`ktrainer.dataparallel.join`): those take part in the calls
of the others with neutral values until all have joined.

Gradients and everything else have channels, and so communicators, of their own: a call on one never
waits for a call on the other. Calls of several threads on one channel run one after another.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ktrainer.dataparallel.calls import Call, call_of, difference, rows_spec, specs_of
from ktrainer.distributed.bucket_sizes import BucketSizes
from ktrainer.distributed.mpi_communicator import MpiGroup
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.errors import DivergenceError, WorldError

GRADIENTS, OTHERS = "dataparallel_gradients", "dataparallel_others"
_NO_WEIGHT = np.array(0.0)
_JOINED = np.iinfo(np.int64).min
_WAIT_OF_JOINED = "join: waits for the ranks that have not joined"


class Channel:
    """Compared, ordered calls over one communicator.

    Args:
        world: the ranks, with a communicator of its own.
        name: of the order of its calls inside of compiled functions; see `InOrder`.

    Attributes:
        sums: of floats, fused.
        error: the last exception in a call, of which TensorFlow makes an error of its own in
            compiled functions.
    """

    def __init__(self, world: MpiGroup, name: str) -> None:
        self.world, self.name = world, name
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self.sums = ChannelSums(self)

    @property
    def size(self) -> int:
        """The number of ranks; with healing it may change between two calls."""
        return self.world.size

    @contextmanager
    def call(self, call: Call) -> Iterator[Sequence[int]]:
        """Make sure that all ranks are in the same call, and keep other threads out of it.

        Yields:
            The ranks that have not joined, as numbers in the process set.

        Raises:
            DivergenceError: ranks are in different calls; raised on all of them.
            DeadlineExceeded, PeerLost: a rank does not call it.
            WorldError: this process has yet to join the others.
        """
        if self.world.alone:
            raise WorldError(
                f"{call.operation}: this process was started to join others, and has not joined "
                "them yet. Make such calls in the function that elastic.run decorates, not before "
                "it; elastic.run gives all ranks the state of rank 0."
            )
        with self._lock, self._keeping_error():
            yield self._compare(call)[0]

    @contextmanager
    def next_call(self) -> Iterator[tuple[Sequence[int], Call | None]]:
        """Wait, as a rank that has joined, for the next call of the others.

        Yields:
            The ranks that have not joined, and their call; None if all have joined.
        """
        with self._lock:
            yield self._compare(None)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def _compare(self, call: Call | None) -> tuple[Sequence[int], Call | None]:
        joined = call is None
        digest, opposite = (_JOINED, _JOINED) if call is None else (call.digest, -call.digest)
        mine = np.array([digest, opposite, joined, not joined], np.int64)
        every = np.empty_like(mine)
        what = _WAIT_OF_JOINED if call is None else str(call)
        self.world.wait(self.world.comm.Iallreduce(mine, every, MPI.MAX), what, mine, every)
        highest, lowest, some_joined, some_active = (int(number) for number in every)
        if not some_active:
            return (), None
        if highest == -lowest and not some_joined:
            return range(self.size), call
        return self._compare_in_full(call, f"comparison of {what}")

    def _compare_in_full(self, call: Call | None, what: str) -> tuple[Sequence[int], Call]:
        """The ranks that have not joined and their call, which differs, or which others lack."""
        found: list[Call | None] = self.world.allgather(call, what)
        present = {rank: each for rank, each in enumerate(found) if each is not None}
        ranks = self.world.ranks
        if said := difference({ranks[rank]: each for rank, each in present.items()}):
            raise DivergenceError(
                f"ranks are in different collective operations: {said}. Every rank must make the "
                "same calls in the same order, with tensors of the same shapes and types."
            )
        return tuple(present), next(iter(present.values()))

    def switch(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        """Use another communicator: ranks were lost, or have joined. All of them call it."""
        self.error = None
        self.world.switch(comm, ranks)
        self.sums.open()

    def close(self) -> None:
        """Free the communicators. All ranks call it together."""
        self.sums.close()
        self.world.close()


class ChannelSums(MpiGradients):
    """`MpiGradients` whose host functions run as calls of a channel.

    Args:
        channel: its ranks; sums use a communicator of their own, under its lock.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.world)
        self._channel = channel
        self._operation = "allreduce"
        self._mean, self._settings = False, _settings("none", 25.0, False)

    def configured(
        self, operation: str, compression: str = "none", bucket_mb: float = 25.0, mean: bool = False
    ) -> ChannelSums:
        """The same communicators, those of the ranks now, with other settings.

        Args:
            operation: names the calls in messages.
            compression: as in `MpiGradients`.
            bucket_mb: largest bucket, in MiB.
            mean: weights are divided by the number of ranks that have not joined.
        """
        other = copy.copy(self)
        other._operation, other._mean = operation, mean
        other._settings = _settings(compression, bucket_mb, mean)
        other.set_wire(compression, BucketSizes(bucket_mb, bucket_mb))
        return other

    @property
    def size(self) -> int:
        """The number of ranks now."""
        return self.world.size

    @size.setter
    def size(self, value: int) -> None:
        """It is that of the world."""

    def reduce_now(self, weight: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums over ranks of `weight * array`, as one bucket, of floats of one type."""
        copies = [np.array(array) for array in arrays]  # sums are made in place
        return self._timed(self.sum_bucket)(weight, *copies)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        run = super()._timed(call)
        slices = call == self.gather_slices

        def as_call(weight: np.ndarray, *arrays: np.ndarray) -> Any:
            specs = tuple(map(rows_spec, arrays)) if slices else specs_of(arrays)
            kind = "slices" if slices else "bucket"
            same = call_of(self._operation, kind, specs, self._settings)
            with self._channel.call(same) as present:
                # Divided here, as a compiled function may outlive a change of the ranks.
                return run(weight / len(present) if self._mean else weight, *arrays)

        return as_call

    def take_part(self, call: Call) -> None:
        """Do this rank's part of a sum of the other ranks, as one that has joined."""
        sums = self.configured(call.operation, **dict(call.detail))
        arrays = [np.zeros([max(n, 0) for n in spec.shape], spec.dtype) for spec in call.tensors]
        if call.kind == "slices":
            sums.gather_slices(_NO_WEIGHT, *arrays)
        else:
            sums.sum_bucket(_NO_WEIGHT, *arrays)


def _settings(compression: str, bucket_mb: float, mean: bool) -> tuple[tuple[str, Any], ...]:
    """The arguments of `configured`, for comparison between ranks."""
    return ("compression", compression), ("bucket_mb", bucket_mb), ("mean", mean)
