"""A world that survives the loss of ranks, and that new ranks may join.

Needs MPI's user-level failure mitigation (ULFM, chapter "Fault Tolerance" of the MPI standard's
proposal; Open MPI 5 with `mpirun --with-ft ulfm`). A lost rank is noticed in some rank's wait. That
rank revokes all communicators, so that the others leave their waits too; all surviving ranks then
call `heal`, in which they agree on who they are:

    rank 0  all-reduce ──► error ──► revoke ─┐
    rank 1  killed                           ├─► heal: shrink, open communicators again
    rank 2  broadcast  ──► revoked ──────────┘   ranks 0, 2 are now 0, 1

A rank that does not answer within the deadline is killed, if it is on this host or the launcher can
reach it, and then counts as lost. How the ranks restore their states is in `ktrainer.elastic`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from ktrainer.config.launch_environment import RELAYED
from ktrainer.distributed.deadlines import call_with_deadline
from ktrainer.distributed.elastic_members import Member, describe_others, failed_ranks, is_loss
from ktrainer.distributed.launcher_events import has_listener, report_silent
from ktrainer.distributed.lost_mpirun import outlive_mpirun
from ktrainer.distributed.mpi_communicator import MpiGroup
from ktrainer.distributed.mpi_progress import has_completed, start_agreement
from ktrainer.distributed.mpi_world import MpiWorld, pause_after
from ktrainer.distributed.stack_dump import enable_stack_dumps, kill
from ktrainer.distributed.stall_report import StallReport, silent_ranks
from ktrainer.errors import DeadlineExceeded, PeerLost, SetupError

_ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpirun sets it for `--with-ft ulfm`
_NOTICE_SECONDS = 10.0  # for MPI to notice that a process was killed


class ElasticWorld(MpiWorld):
    """Ranks of `MPI.COMM_WORLD` that may be lost, and ranks that join later.

    Args:
        stable_rank: of a joining rank, which is alone until it is admitted; None for ranks that
            mpirun started.
        start_deadline: seconds to wait for the ranks that mpirun started.

    Attributes:
        members: all ranks, by rank.
        alone: whether this joining rank still waits to be admitted. It is then a world of one, but
            not the rank that writes.
        nominal_size: number of ranks when training began, which settings scale by.
        trained: whether a `fit` has begun.
        phases: how many phases of the script, in which losses are healed and in which they are
            not, have begun after the first; see `ktrainer.distributed.launcher_events`.
        on_change: called on all ranks, in order, whenever new communicators must be made.

    Raises:
        SetupError: MPI was started without failure mitigation.
    """

    heals = True
    _broken = False

    def __init__(self, stable_rank: int | None = None, start_deadline: float = 1800.0) -> None:
        if os.environ.get(_ENABLED) not in ("1", "true"):
            raise SetupError(
                "world.heal=true needs MPI's failure mitigation, which was not switched on when "
                "the processes were started: use `ktrainer run --heal`, or "
                "`mpirun --with-ft ulfm`"
            )
        super().__init__(start_deadline)
        if RELAYED in os.environ and not outlive_mpirun():
            text = "this MPI ends its ranks when mpirun is lost; they save no checkpoint then"
            print(f"ktrainer: {text}", file=sys.stderr, flush=True)
        self.alone = stable_rank is not None
        self._stable_rank = self.rank if stable_rank is None else stable_rank
        self.join_handshake: Any = None  # of a joining rank; see `joining_ranks`
        self.bucket_sizes: tuple[float, float] | None = None  # once chosen
        self.on_change: list[Callable[[], None]] = []
        self._copies: list[MPI.Intracomm] = []
        self._called = False
        self.trained = False
        self.phases = 0
        self._silent: list[int] = []  # ranks that did not answer the last stall report
        if stable_rank is not None:
            self.local_rank = int(os.environ.get("KTRAINER_LOCAL_RANK", stable_rank))
        else:  # by the processes: mpirun may have started them as if all were on its host
            here = self._ranks_here()
            self.local_rank, self.local_size = here.index(self.rank), len(here)
        self.nominal_size = self.size
        self.members: list[Member] = []
        self._exchange_members("members of the world")

    @property
    def is_root(self) -> bool:
        return self.rank == 0 and not self.alone

    def gather_rows(self, row: np.ndarray, what: str) -> np.ndarray:
        """The float64 `row` of every rank, `[size, len(row)]`, in one message; rows have the same
        length on all ranks."""
        table = np.empty((self.size, row.size), np.float64)
        self.wait(self.comm.Iallgather(row, table), what, row, table)
        return table

    @property
    def stable_rank(self) -> int:
        return self._stable_rank

    @property
    def nominal_replicas(self) -> int:
        return self.nominal_size

    # -- failures

    @property
    def broken(self) -> bool:
        """True if a rank was lost, or a wait here revoked, since the last `heal`."""
        return self._broken

    def has_lost(self, error: BaseException) -> bool:
        """Return whether an error means a lost rank, not one that raised or did not answer, and
        this rank can heal."""
        lost = is_loss(error) or (self.broken and isinstance(error, PeerLost))
        return lost and self._can_heal

    @property
    def _can_heal(self) -> bool:
        """True unless a wait was interrupted by anything but a loss, of which MPI tells all ranks:
        others may be in that operation still, and it may be one of those that heal."""
        return isinstance(self.interrupted_by, PeerLost | MPI.Exception | None)

    def wait(self, request: Any, what: str, *buffers: Any) -> None:
        try:
            super().wait(request, what, *buffers)
        except DeadlineExceeded:
            if not self._kill_silent():
                raise
            self.interrupted_by = None  # the wait ends after all, or by a loss
            try:
                self._raise_killed(request, what)
            except BaseException as error:
                self.record_interruption(error)
                raise
        except PeerLost:
            self.revoke()
            raise

    def record_interruption(self, error: BaseException) -> None:
        if self._can_heal:  # from what was recorded before; perhaps not from this
            self.interrupted_by = None
        super().record_interruption(error)

    def check_usable(self) -> None:
        if not self._can_heal:  # else communicators may be revoked: MPI's errors make ranks heal
            super().check_usable()

    def answer(self, what: str) -> None:
        with suppress(MPI.Exception):  # the rank that asked may be lost
            super().answer(what)

    def who_is_missing(self, what: str) -> str:
        self._silent = []
        try:
            answers = self._stall_report.ask(self._doing(what), self.answer_seconds)
        except MPI.Exception:
            return ""
        self._silent = silent_ranks(self.size, self.rank, answers)
        return self._describe(answers)

    def revoke(self) -> None:
        """Make every rank's waits fail, those under way and those to come."""
        self._broken = True
        for comm in [self._comm, self._stall_report.comm, *self._copies]:
            with suppress(MPI.Exception):
                cast(Any, comm).Revoke()

    def duplicate(self) -> MPI.Intracomm:
        copy = call_with_deadline(self, self.comm.Dup, "open a communicator")
        self.watch(copy)
        return copy

    def watch(self, comm: MPI.Intracomm) -> None:
        self._copies.append(comm)

    def group(self, ranks: Sequence[int], name: str) -> MpiGroup:
        """A world of some of the ranks; revoked with the first loss of any rank of this world."""
        made = super().group(ranks, name)
        self.watch(made.comm)
        return made

    def agree(self, what: str) -> None:
        """Check that no rank is lost; all ranks call it, at the same place.

        Raises:
            PeerLost: on all surviving ranks, if one was lost or wants to heal.
        """
        if not self._all_agree(self.comm, not self._broken):
            self._called = True
            self.revoke()
            raise PeerLost(self._lost_in(what))

    def heal(self) -> list[Member]:
        """Continue without the lost ranks. All surviving ranks call it.

        Returns:
            The lost ranks.

        Raises:
            DeadlineExceeded: a rank neither failed nor called it.
            WorldError: a wait was interrupted by anything but a loss.
        """
        self.check_usable()
        self.revoke()
        before = self.members
        if not self._called:  # ranks that are about to agree on something learn of it by this
            self._all_agree(self._comm, False)
        self._shrink_and_open(self._comm)
        surviving = {member.stable_rank for member in self.members}
        return [member for member in before if member.stable_rank not in surviving]

    def _shrink_and_open(self, comm: MPI.Intracomm) -> None:
        while True:
            comm = self._shrunk(comm)
            if self._try_open(comm):
                return

    def admit(
        self, merged: MPI.Intracomm | None, tell: Callable[[bool], None] = lambda _: None
    ) -> None:
        """Switch to `merged`, in which a joining rank is the last rank. All ranks call it; the
        joining rank calls `enter`.

        Args:
            merged: None where it could not be made.
            tell: called once it is known whether all ranks have it.

        Raises:
            PeerLost: on all ranks, if one does not have it: they heal, though perhaps only the
                joining rank was lost.
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
        """Switch to `merged`, which all of its ranks have, without ranks lost meanwhile."""
        self.alone = False
        if not self._try_open(merged):
            self._shrink_and_open(merged)

    def _try_open(self, comm: MPI.Intracomm) -> bool:
        """Open everything over `comm`; return whether that worked on all of its ranks."""
        opened = True
        try:
            self._open(comm)
        except (MPI.Exception, PeerLost):
            opened = False
            self.revoke()
            with suppress(MPI.Exception):
                cast(Any, comm).Revoke()
        return self._all_agree(comm, opened)

    def _open(self, comm: MPI.Intracomm) -> None:
        self._copies = []
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.interrupted_by = None
        others = self._describe_others
        self._stall_report = call_with_deadline(
            self, lambda: StallReport(comm.Dup()), "reopen the world", others
        )
        self._broken = self._called = False
        self._exchange_members("members of the reopened world")
        self.local_size = len(self._ranks_here())
        self.assign_replica(self.rank, self.size)
        for reopen in self.on_change:
            reopen()

    def _exchange_members(self, what: str) -> None:
        mine = Member(self.stable_rank, self.local_rank, enable_stack_dumps())
        self.members = self.allgather(mine, what)
        self._processes = {rank: member.process for rank, member in enumerate(self.members)}

    def _ranks_here(self) -> list[int]:
        here = self._processes[self.rank].where
        return [rank for rank, process in self._processes.items() if process.where == here]

    def _shrunk(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        # Open MPI 5's `Ishrink` frees what is not its own.
        shrink = cast(Any, comm).Shrink
        return call_with_deadline(self, shrink, "shrink the world", self._describe_others)

    def _all_agree(self, comm: MPI.Intracomm, mine: bool) -> bool:
        flag = np.array([int(mine)], np.int32)
        try:
            self._poll(start_agreement(comm, flag), "agree on the surviving ranks", flag)
        except MPI.Exception:  # the same on all: one more was lost meanwhile
            return False
        return bool(flag[0])

    def _poll(self, request: MPI.Request, what: str, buffer: np.ndarray) -> None:
        """Wait for a request that completes in spite of failures."""
        began = time.monotonic()
        try:
            while not has_completed(request):
                if (waited := time.monotonic() - began) > self.deadline:
                    others = self._describe_others()
                    raise DeadlineExceeded(self.rank, self.step, what, self.deadline, others)
                time.sleep(pause_after(waited))
        finally:
            if request:
                self.keep_unfinished(request, buffer)

    def _describe_others(self) -> str:
        return describe_others(self.members, self.stable_rank)

    def _lost_ranks(self) -> list[int]:
        return sorted({*super()._lost_ranks(), *failed_ranks(self._comm)})

    def _kill_silent(self) -> bool:
        """Kill the processes that did not answer, those of other hosts through the launcher; return
        whether there were any."""
        elsewhere = [rank for rank in self._silent if not kill(self._processes[rank])]
        asks = bool(elsewhere) and has_listener()
        if asks:
            report_silent(self.members[rank].stable_rank for rank in elsewhere)
        return asks or len(elsewhere) < len(self._silent)

    def _raise_killed(self, request: MPI.Request, what: str) -> None:
        """Raise once MPI notices the killed processes; return if the request has completed."""
        end = time.monotonic() + _NOTICE_SECONDS
        try:
            while not has_completed(request):
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
            f"{names}, which did not answer and was killed"
        )
