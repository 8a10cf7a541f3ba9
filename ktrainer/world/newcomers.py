"""Processes that join ranks which are already training.

    rank 0                                  newcomer
    starts it, in a thread       ──►        imports, builds the model, runs a step
    looks between two steps      ◄──        READY
    all ranks: JOIN              ──►
    one communicator of all ranks and the newcomer, made by all together
    IN, or OUT if it failed      ──►        is the last rank, and is given the state

Rank 0 talks to it over a communicator of the two alone, the bridge. When rank 0 dies before the
newcomer is in, the newcomer ends, and the new rank 0 starts another.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from mpi4py import MPI

from ktrainer.config.launched import ports_on_loopback
from ktrainer.errors import DeadlineExceeded
from ktrainer.world.blocking import in_time
from ktrainer.world.healing import HealingWorld
from ktrainer.world.listening import narrow_at
from ktrainer.world.stacks import answering, end

SLOT = "KTRAINER_SLOT"  # set in newcomers
LOCAL_RANK = "KTRAINER_LOCAL_RANK"
_READY, _JOIN, _VERDICT, _MEET, _PROCESS = 1, 2, 3, 4, 5
_LOOK_SECONDS = 0.02
_NARROW_SECONDS = 5.0  # then MPI may listen where it does
_DISMISS_SECONDS = 2.0


class Recruit:
    """A newcomer, seen from rank 0.

    Args:
        slot: its number for life.
        local_rank: which device of this host it uses.
        command: what it runs; default: the command that this process was started with.

    Attributes:
        failed: it could not be started, or died.
    """

    def __init__(self, slot: int, local_rank: int, command: list[str] | None = None) -> None:
        self.slot, self.failed, self._unwanted = slot, False, False
        self.bridge: MPI.Intracomm | None = None
        self._ready = False
        words = [f"{SLOT}={slot}", f"{LOCAL_RANK}={local_rank}"]
        self._words = words + (command or [sys.executable, *sys.orig_argv[1:]])
        # To start a process takes a second or so, which the training need not wait.
        thread = threading.Thread(target=self._start, name="ktrainer-newcomer", daemon=True)
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
        """It is not wanted any more, wherever it is in its preparations."""
        self._unwanted = True
        if self.bridge is None or self.failed:
            return
        with contextlib.suppress(MPI.Exception):
            self.bridge.isend(False, 1, _JOIN)
            until = time.monotonic() + _DISMISS_SECONDS
            while not self.bridge.iprobe(source=1, tag=_PROCESS):
                if time.monotonic() > until:
                    return
                time.sleep(_LOOK_SECONDS)
            end(self.bridge.recv(source=1, tag=_PROCESS))

    def ready(self) -> bool:
        """Whether it has built everything and waits to be admitted."""
        if self.bridge is None or self.failed or self._ready:
            return self._ready and not self.failed
        try:
            if self.bridge.iprobe(source=1, tag=_READY):
                self.bridge.recv(source=1, tag=_READY)
                self._ready = True
        except MPI.Exception:  # it has died
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


def admit(world: HealingWorld, recruit: Recruit | None) -> None:
    """Make a newcomer a rank of `world`. All ranks call it together.

    Args:
        recruit: on rank 0, the newcomer, which is ready; None elsewhere.

    Raises:
        PeerLost: on all ranks, if it, or one of them, died on the way.
    """
    both = merged = None
    try:
        if recruit is not None:
            recruit.call()
        bridge = recruit.bridge if recruit is not None else None
        comm, peer = world.comm, bridge or MPI.COMM_SELF  # which only rank 0's is looked at
        what = "admit a newcomer"
        both = in_time(world, lambda: comm.Create_intercomm(0, peer, 1, _MEET), what)
        merged = in_time(world, lambda: both.Merge(high=False), what)
    except MPI.Exception:  # it has died, or one of us; let the others out of these calls too
        world.revoke()
        if both is not None:
            with contextlib.suppress(MPI.Exception):
                both.Revoke()

    # The newcomer takes part in what follows the agreement, so it is told in between.
    def tell(admitted: bool) -> None:
        with contextlib.suppress(MPI.Exception):
            if recruit is not None:
                recruit.tell(admitted)

    world.admit(merged, tell)


def open_healing_world(start_deadline: float) -> HealingWorld:
    """The world of a process that mpirun started, or one that trains already.

    Args:
        start_deadline: seconds that those that mpirun started wait for one another.
    """
    if SLOT not in os.environ or MPI.Comm.Get_parent() == MPI.COMM_NULL:
        world = HealingWorld(start_deadline=start_deadline)
    else:
        world = HealingWorld(int(os.environ[SLOT]))
        world.entrance = Entrance()
    # Of a newcomer not before: rank 0 may be about to connect, to a socket that would close then.
    ports, until = ports_on_loopback(os.environ), time.monotonic() + _NARROW_SECONDS
    while ports and not narrow_at(ports) and time.monotonic() < until:
        world.comm.Iprobe()  # lets MPI accept who has called
        time.sleep(_LOOK_SECONDS)
    return world


class Entrance:
    """The way in, seen from the newcomer."""

    def __init__(self) -> None:
        self._bridge = MPI.Comm.Get_parent().Merge(high=True)
        self._bridge.send(answering(), 0, _PROCESS)

    def wait(self, world: HealingWorld) -> bool:
        """Say that this process is ready, and become a rank of the world when it is called.

        Returns:
            Whether it is one now; if not, those that started it are gone, or did not want it.
        """
        try:
            self._bridge.send(None, 0, _READY)
            if not self._receive(_JOIN, None, world):
                return False
            what, bridge = "be admitted", self._bridge
            both = in_time(world, lambda: MPI.COMM_SELF.Create_intercomm(0, bridge, 0, _MEET), what)
            merged = in_time(world, lambda: both.Merge(high=True), what)
            if not self._receive(_VERDICT, world.deadline, world):
                return False
        except MPI.Exception:
            return False
        world.enter(merged)
        return True

    def _receive(self, tag: int, seconds: float | None, world: HealingWorld) -> Any:
        """The message of rank 0; it may be long in coming, but then rank 0 must be alive."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._bridge.iprobe(source=0, tag=tag):
            if until is not None and time.monotonic() > until:
                raise DeadlineExceeded(
                    world.slot,
                    world.step,
                    "be admitted",
                    world.deadline,
                    "Rank 0, which started this one, does not say whether all ranks have it.",
                )
            time.sleep(_LOOK_SECONDS)
        return self._bridge.recv(source=0, tag=tag)


def free_local_rank(world: HealingWorld) -> int:
    """The least number that no process of this host uses."""
    here = world.peers[world.rank].process.where
    used = {peer.local_rank for peer in world.peers if peer.process.where == here}
    return next(n for n in range(len(used) + 1) if n not in used)
