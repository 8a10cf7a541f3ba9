"""Processes that join ranks which are already training.

    rank 0                                  joining rank
    starts it, in a thread       ──►        imports, builds the model, runs a step
    looks between two steps      ◄──        READY
    all ranks: JOIN              ──►
    one communicator of all of them, made by all together
    IN, or OUT if it failed      ──►        is the last rank, and is given the state

Rank 0 talks to it over a communicator of the two alone, the bridge. If rank 0 is lost before the
joining rank is admitted, the latter ends, and the new rank 0 starts another.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from mpi4py import MPI

from ktrainer.config.launch_environment import JOINED_SIZE
from ktrainer.distributed.deadlines import call_with_deadline
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.distributed.mpi_world import keep_on_interface
from ktrainer.distributed.stack_dump import enable_stack_dumps, kill
from ktrainer.errors import DeadlineExceeded

STABLE_RANK = "KTRAINER_STABLE_RANK"  # set in joining ranks
LOCAL_RANK = "KTRAINER_LOCAL_RANK"
_BUCKETS = "KTRAINER_BUCKET_SIZES"  # that the others have chosen, in MiB
_READY, _JOIN, _VERDICT, _MEET, _PROCESS = 1, 2, 3, 4, 5
_POLL_SECONDS = 0.02
_DISMISS_SECONDS = 2.0


class SpawnedRank:
    """A joining process, as rank 0 sees it.

    Args:
        stable_rank: its number.
        local_rank: which device of this host it uses.
        size: how many ranks there will be with it.
        command: what it runs; default: the command that this process was started with.
        bucket_sizes: that the others have compiled their step with, if they have chosen them.

    Attributes:
        failed: it could not be started, or has failed since.
    """

    def __init__(
        self,
        stable_rank: int,
        local_rank: int,
        size: int,
        command: list[str] | None = None,
        bucket_sizes: tuple[float, float] | None = None,
    ) -> None:
        self.stable_rank, self.failed, self._unwanted = stable_rank, False, False
        self.bridge: MPI.Intracomm | None = None
        self._ready = False
        words: dict[str, Any] = {STABLE_RANK: stable_rank, LOCAL_RANK: local_rank}
        words |= {JOINED_SIZE: size, _BUCKETS: json.dumps(bucket_sizes, separators=(",", ":"))}
        self._words = [f"{name}={value}" for name, value in words.items()]
        self._words += command or [sys.executable, *sys.orig_argv[1:]]
        # Starting a process takes a second or so, which training need not wait for.
        thread = threading.Thread(target=self._start, name="ktrainer-joining-rank", daemon=True)
        thread.start()

    def _start(self) -> None:
        try:
            both = MPI.COMM_SELF.Spawn("env", args=self._words, maxprocs=1)
            self.bridge = both.Merge(high=False)
        except MPI.Exception:
            self.failed = True
        if self._unwanted:
            self.dismiss()

    def dismiss(self) -> None:
        """End it, wherever it is in its preparations: it is not needed any more."""
        self._unwanted = True
        if self.bridge is None or self.failed:
            return
        with suppress(MPI.Exception):
            self.bridge.isend(False, 1, _JOIN)
            until = time.monotonic() + _DISMISS_SECONDS
            while not self.bridge.iprobe(source=1, tag=_PROCESS):
                if time.monotonic() > until:
                    return
                time.sleep(_POLL_SECONDS)
            kill(self.bridge.recv(source=1, tag=_PROCESS))

    def ready(self) -> bool:
        """Return whether it has built everything and waits to be admitted."""
        if self.bridge is None or self.failed or self._ready:
            return self._ready and not self.failed
        try:
            if self.bridge.iprobe(source=1, tag=_READY):
                self.bridge.recv(source=1, tag=_READY)
                self._ready = True
        except MPI.Exception:  # it has failed
            self.failed = True
        return self._ready

    def call(self) -> None:
        """Tell it that the others are about to admit it."""
        assert self.bridge is not None
        self.bridge.send(True, 1, _JOIN)

    def tell(self, admitted: bool) -> None:
        """Tell it whether all ranks have it."""
        assert self.bridge is not None
        self.bridge.send(admitted, 1, _VERDICT)


def admit(world: ElasticWorld, joining_rank: SpawnedRank | None) -> None:
    """Make a joining process a rank of `world`. All ranks call it together.

    Args:
        joining_rank: on rank 0, the process that joins and is ready; None elsewhere.

    Raises:
        PeerLost: on all ranks, if it, or one of them, was lost on the way.
    """
    both = merged = None
    try:
        if joining_rank is not None:
            joining_rank.call()
        bridge = joining_rank.bridge if joining_rank is not None else None
        comm, peer = world.comm, bridge or MPI.COMM_SELF  # only that of rank 0 counts
        what = "admit a joining rank"
        both = call_with_deadline(world, lambda: comm.Create_intercomm(0, peer, 1, _MEET), what)
        merged = call_with_deadline(world, lambda: both.Merge(high=False), what)
    except MPI.Exception:  # it, or one of us, is lost; release the others from these calls
        world.revoke()
        if both is not None:
            with suppress(MPI.Exception):
                both.Revoke()

    # The joining rank takes part in what follows the agreement, so it is told in between.
    def tell(admitted: bool) -> None:
        with suppress(MPI.Exception):
            if joining_rank is not None:
                joining_rank.tell(admitted)

    world.admit(merged, tell)


def open_elastic_world(start_deadline: float) -> ElasticWorld:
    """The world of a process that mpirun started, or of a joining rank.

    Args:
        start_deadline: seconds that ranks started by mpirun wait for one another.
    """
    if STABLE_RANK not in os.environ or MPI.Comm.Get_parent() == MPI.COMM_NULL:
        world = ElasticWorld(start_deadline=start_deadline)
    else:
        world = ElasticWorld(int(os.environ[STABLE_RANK]))
        world.bucket_sizes = json.loads(os.environ[_BUCKETS])
        world.join_handshake = JoinHandshake()
    # Of a joining rank only now: rank 0 may have been about to connect to what closes here.
    keep_on_interface(world.comm)
    return world


class JoinHandshake:
    """Joining the world, as the joining rank sees it."""

    def __init__(self) -> None:
        self._bridge = MPI.Comm.Get_parent().Merge(high=True)
        self._bridge.send(enable_stack_dumps(), 0, _PROCESS)

    def wait(self, world: ElasticWorld) -> bool:
        """Say that this process is ready, and become a rank of the world when it is called.

        Returns:
            Whether it is one now; if not, the ranks that started it are gone, or dismissed it.
        """
        try:
            self._bridge.send(None, 0, _READY)
            if not self._receive(_JOIN, None, world):
                return False
            what, bridge = "be admitted", self._bridge
            both = call_with_deadline(
                world, lambda: MPI.COMM_SELF.Create_intercomm(0, bridge, 0, _MEET), what
            )
            merged = call_with_deadline(world, lambda: both.Merge(high=True), what)
            if not self._receive(_VERDICT, world.deadline, world):
                return False
        except MPI.Exception:
            return False
        world.enter(merged)
        return True

    def _receive(self, tag: int, seconds: float | None, world: ElasticWorld) -> Any:
        """The message of rank 0; None for `seconds`: wait as long as rank 0 is alive."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._bridge.iprobe(source=0, tag=tag):
            if until is not None and time.monotonic() > until:
                raise DeadlineExceeded(
                    world.stable_rank,
                    world.step,
                    "be admitted",
                    world.deadline,
                    "Rank 0, which started this one, does not say whether all ranks have it.",
                )
            time.sleep(_POLL_SECONDS)
        return self._bridge.recv(source=0, tag=tag)


def free_local_rank(world: ElasticWorld) -> int:
    """The lowest local rank that no process of this host uses."""
    here = world.members[world.rank].process.where
    used = {m.local_rank for m in world.members if m.process.where == here}
    return next(n for n in range(len(used) + 1) if n not in used)
