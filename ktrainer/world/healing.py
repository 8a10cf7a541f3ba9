"""A world that outlives its ranks: those that are left go on, and newcomers may join.

Needs MPI's user-level failure mitigation (ULFM, chapter "Fault Tolerance" of the MPI standard's
proposal; Open MPI 5 with `mpirun --with-ft ulfm`). A death comes to light in some rank's wait. That
rank revokes all communicators, so that the others leave their waits too; everybody who is left then
calls `heal`, which agrees on who that is:

    rank 0  all-reduce ──► error ──► revoke ─┐
    rank 1  killed                           ├─► heal: shrink, open communicators again
    rank 2  broadcast  ──► revoked ──────────┘   ranks 0, 2 are now 0, 1

A rank that does not answer within the deadline is ended, if it is on this host, and then counts as
dead. What the ranks do with their states is not known here: see `ktrainer.healing`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ktrainer.errors import DeadlineExceeded, PeerLost, SetupError
from ktrainer.world.blocking import in_time
from ktrainer.world.mpi import MpiWorld
from ktrainer.world.mpi_group import MpiGroup
from ktrainer.world.peers import Peer, known_to_have_died, where_others_are
from ktrainer.world.rollcall import RollCall, silent
from ktrainer.world.stacks import answering, end

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpirun sets it for `--with-ft ulfm`
_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
_NEWS_SECONDS = 10.0  # what MPI has to notice that a process on this host was ended


class HealingWorld(MpiWorld):
    """Ranks of `MPI.COMM_WORLD` that may die, and such as come later.

    Args:
        slot: of a newcomer, which is alone until it is admitted; None for those that mpirun
            started.
        start_deadline: seconds to wait for those to come here.

    Attributes:
        peers: all ranks, by rank.
        alone: whether this newcomer still waits to be admitted. It is then a world of one, but not
            the rank that writes.
        nominal_size: ranks when training began, which what is set by their number goes by.
        trained: whether a `fit` has begun.
        parts: how many parts of the script, in which deaths are healed and in which they are not,
            have begun after the first; see `ktrainer.telling`.
        on_change: called on all ranks, in order, whenever there are new communicators to make.

    Raises:
        SetupError: MPI was started without failure mitigation.
    """

    heals = True

    def __init__(self, slot: int | None = None, start_deadline: float = 1800.0) -> None:
        if os.environ.get(_ENABLED) not in ("1", "true"):
            raise SetupError(
                "world.heal=true needs MPI's failure mitigation, which was not switched on when "
                "the processes were started: use `ktrainer run --heal`, or "
                "`mpirun --with-ft ulfm`"
            )
        super().__init__(start_deadline)
        self.alone = slot is not None
        self._slot = self.rank if slot is None else slot
        self.entrance: Any = None  # of a newcomer: see `ktrainer.world.newcomers`
        self.on_change: list[Callable[[], None]] = []
        self._copies: list[MPI.Intracomm] = []
        self._broken = self._called = False
        self.trained = False
        self.parts = 0
        self._silent: list[int] = []  # ranks that did not answer when asked what they do
        if slot is not None:
            self.local_rank = int(os.environ.get("KTRAINER_LOCAL_RANK", slot))
        self.nominal_size = self.size
        self.peers: list[Peer] = []
        self._meet("who is here")

    @property
    def is_root(self) -> bool:
        return self.rank == 0 and not self.alone

    def gather_rows(self, row: np.ndarray, what: str) -> np.ndarray:
        """The float64 `row` of every rank, `[size, len(row)]`, in one message; rows are equally
        long on all ranks."""
        table = np.empty((self.size, row.size), np.float64)
        self.wait(self.comm.Iallgather(row, table), what)
        return table

    @property
    def slot(self) -> int:
        return self._slot

    @property
    def nominal_replicas(self) -> int:
        return self.nominal_size

    # -- failures

    @property
    def broken(self) -> bool:
        """Whether a rank has died, or a wait here was revoked, since the world was last whole."""
        return self._broken

    def has_lost(self, error: BaseException) -> bool:
        """Whether an error says that a rank died, and not that it failed or did not answer."""
        return is_loss(error) or (self.broken and isinstance(error, PeerLost))

    def wait(self, request: Any, what: str) -> None:
        try:
            super().wait(request, what)
        except DeadlineExceeded:
            if not self._end_silent():
                raise
            self._hear_of_death(request, what)
        except PeerLost:
            self.revoke()
            raise

    def answer(self, what: str) -> None:
        with contextlib.suppress(MPI.Exception):  # whoever asked may have died
            super().answer(what)

    def who_is_missing(self, what: str) -> str:
        self._silent = []
        try:
            answers = self._roll_call.ask(self._doing(what), self.answer_seconds)
        except MPI.Exception:
            return ""
        self._silent = silent(self.size, self.rank, answers)
        return self._report(answers)

    def revoke(self) -> None:
        """Let every rank leave its waits: those under way, and those to come, fail."""
        self._broken = True
        for comm in [self.comm, self._roll_call.comm, *self._copies]:
            with contextlib.suppress(MPI.Exception):
                cast(Any, comm).Revoke()

    def duplicate(self) -> MPI.Intracomm:
        copy = in_time(self, self.comm.Dup, "open a communicator")
        self.watch(copy)
        return copy

    def watch(self, comm: MPI.Intracomm) -> None:
        self._copies.append(comm)

    def group(self, ranks: Sequence[int], name: str) -> MpiGroup:
        """As of any world of processes; it is lost with the first rank of the world that dies."""
        made = super().group(ranks, name)
        self.watch(made.comm)
        return made

    def agree(self, what: str) -> None:
        """Go on together; all ranks call it, at the same place.

        Raises:
            PeerLost: on all ranks that are left, if one has died or wants to heal.
        """
        if not self._all_agree(self.comm, not self._broken):
            self._called = True
            self.revoke()
            raise PeerLost(self._lost_in(what))

    def heal(self) -> list[Peer]:
        """Go on without those that died. All who are left call it, nobody else.

        Returns:
            Those that died.

        Raises:
            DeadlineExceeded: somebody neither died nor came.
        """
        self.revoke()
        before = self.peers
        if not self._called:  # those that are just about to agree on something hear of it so
            self._all_agree(self.comm, False)
        self._go_on_without_the_dead(self.comm)
        left = {peer.slot for peer in self.peers}
        return [peer for peer in before if peer.slot not in left]

    def _go_on_without_the_dead(self, comm: MPI.Intracomm) -> None:
        while True:
            comm = self._shrunk(comm)
            if self._taken_up(comm):
                return

    def admit(
        self, merged: MPI.Intracomm | None, tell: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Go on over `merged`, in which a newcomer is the last rank. All ranks call it; the
        newcomer calls `enter`.

        Args:
            merged: None where it could not be made.
            tell: called once it is known whether all ranks have it.

        Raises:
            PeerLost: on all ranks, if one does not have it: they heal, though perhaps it is the
                newcomer alone that died.
        """
        everywhere = self._all_agree(self.comm, merged is not None)
        tell(everywhere)
        if not everywhere:
            self._called = True
            self.revoke()
            if merged is not None:
                cast(Any, merged).Revoke()
            raise PeerLost(
                f"rank {self.rank} lost a peer at step {self.step}: one that was to join"
            )
        assert merged is not None
        self.enter(merged)

    def enter(self, merged: MPI.Intracomm) -> None:
        """Go on over `merged`, that all of its ranks have; without those that die meanwhile."""
        self.alone = False
        if not self._taken_up(merged):
            self._go_on_without_the_dead(merged)

    def _taken_up(self, comm: MPI.Intracomm) -> bool:
        """Open everything over `comm`; whether that worked on all of its ranks."""
        opened = True
        try:
            self._open(comm)
        except (MPI.Exception, PeerLost):
            opened = False
            self.revoke()
            with contextlib.suppress(MPI.Exception):
                cast(Any, comm).Revoke()
        return self._all_agree(comm, opened)

    def _open(self, comm: MPI.Intracomm) -> None:
        self._copies = []
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        others = self._where_all_are
        self._roll_call = in_time(self, lambda: RollCall(comm.Dup()), "open the world anew", others)
        self._broken = self._called = False
        self._meet("who is left")
        self.share_data(self.rank, self.size)
        for reopen in self.on_change:
            reopen()

    def _meet(self, what: str) -> None:
        """Learn who the ranks are."""
        self.peers = self.allgather(Peer(self.slot, self.local_rank, answering()), what)
        self._processes = {rank: peer.process for rank, peer in enumerate(self.peers)}

    def _shrunk(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        # Open MPI 5's `Ishrink` frees what is not its own.
        shrink = cast(Any, comm).Shrink
        return in_time(self, shrink, "shrink the world", self._where_all_are)

    def _all_agree(self, comm: MPI.Intracomm, mine: bool) -> bool:
        flag = np.array([int(mine)], np.int32)
        try:
            self._poll(cast(Any, comm).Iagree(flag), "agree on who is left")
        except MPI.Exception:  # the same on all: one more has died meanwhile
            return False
        return bool(flag[0])

    def _poll(self, request: MPI.Request, what: str) -> None:
        """Wait for a request that goes on past failures."""
        end = time.monotonic() + self.deadline
        while not request.Test():
            if time.monotonic() > end:
                others = self._where_all_are()
                raise DeadlineExceeded(self.rank, self.step, what, self.deadline, others)
            time.sleep(50e-6)

    def _where_all_are(self) -> str:
        return where_others_are(self.peers, self.slot)

    def _dead(self) -> list[int]:
        return sorted({*super()._dead(), *known_to_have_died(self.comm)})

    def _end_silent(self) -> bool:
        """End the processes of this host that did not answer; whether there were any."""
        here = [end(self._processes[rank]) for rank in self._silent]
        return any(here)

    def _hear_of_death(self, request: MPI.Request, what: str) -> None:
        end = time.monotonic() + _NEWS_SECONDS
        try:
            while not request.Test():
                if time.monotonic() > end:
                    break
                time.sleep(1e-3)
            else:
                return
        except MPI.Exception:
            pass
        self.revoke()
        names = ", ".join(str(rank) for rank in self._silent)
        raise PeerLost(
            f"rank {self.rank} waited {self.deadline:g} s at step {self.step} in {what!r} for rank "
            f"{names}, which did not answer and was ended"
        )


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says, itself or by its causes, that MPI reported a dead rank."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MPI.Exception) and error.Get_error_class() in _FAILURES:
            return True
        error = error.__cause__ or error.__context__
    return False
