"""Channels: one order of collective calls among the ranks of a process set.

Before each call the ranks compare digests of what they are about to do, in one message of 32 bytes.
Ranks in different calls get an error that names both, instead of each other's numbers. The same
message tells of ranks that have joined (`ktrainer.dataparallel.join`): those take part in the calls
of the others with neutral values until all have joined.

Gradients and everything else have channels, and so communicators, of their own: a call on one never
waits for a call on the other. Calls of several threads on one channel run one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from ktrainer.dataparallel.calls import Call, difference
from ktrainer.distributed.mpi_communicator import MpiComm
from ktrainer.errors import DivergenceError, WorldError

_JOINED = np.iinfo(np.int64).min
_WAIT_OF_JOINED = "join: waits for the ranks that have not joined"


class Channel:
    """Compared, ordered calls over one communicator.

    Args:
        world: the ranks, with a communicator of its own.
        lane: the order of its calls inside of compiled functions; see `InOrder`.

    Attributes:
        error: the last exception in a call, of which TensorFlow makes an error of its own in
            compiled functions.
    """

    def __init__(self, world: MpiComm, lane: str) -> None:
        self.world, self.lane = world, lane
        self.error: BaseException | None = None
        self._lock = threading.RLock()

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

    def close(self) -> None:
        """Free the communicator. All ranks call it together."""
        self.world.close()
