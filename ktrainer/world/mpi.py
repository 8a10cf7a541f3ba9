"""The world of processes that MPI started.

Each use has a communicator of its own, duplicated from `COMM_WORLD`, so that host messages and
gradients can be under way at once without being mistaken for one another.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mpi4py import MPI

from ktrainer.errors import DeadlineExceeded, PeerLost, WorldError, name_ranks
from ktrainer.world.blocking import in_time
from ktrainer.world.meeting import meet
from ktrainer.world.mpi_comm import MpiComm
from ktrainer.world.mpi_group import MpiGroup
from ktrainer.world.rollcall import (
    ANSWER_SECONDS,
    LOOK_SECONDS,
    RollCall,
    report,
    silent,
)
from ktrainer.world.stacks import Process, answering, has_ended, where_they_are

_SPIN_SECONDS = 0.002  # poll without sleeping at first: most waits are microseconds


class MpiWorld(MpiComm):
    """Ranks of `MPI.COMM_WORLD`, talking through a communicator of their own.

    Args:
        start_deadline: seconds to wait for all of them to come here.

    Raises:
        DeadlineExceeded: naming those that have not come.
    """

    def __init__(self, start_deadline: float = 1800.0) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which gradients and host "
                "messages that overlap need; start the script through `ktrainer run`, or "
                "leave mpi4py.rc.thread_level at 'multiple'"
            )
        _end_all_with_this_rank()
        meet(MPI.COMM_WORLD, start_deadline)
        super().__init__(MPI.COMM_WORLD.Dup())
        self._roll_call = RollCall(self.comm.Dup())
        self._processes: dict[int, Process] = {}
        self._processes |= enumerate(self.allgather(answering(), "who is where"))

    def group(self, ranks: Sequence[int], name: str) -> MpiGroup:
        """A world of some of the ranks, this one among them.

        Every rank of this world must call it at the same time, each with the ranks of its own
        group; the groups are disjoint.

        Args:
            ranks: ranks of this world. Their order is that of the ranks in the group.
            name: what the group is, for error messages: `"the stages of replica 1"`.

        Raises:
            WorldError: on every rank, if the ranks of a group do not all name the same ones.
            DeadlineExceeded: a rank does not come to open it.
        """
        ranks = tuple(int(rank) for rank in ranks)
        every: list[tuple[int, ...]] = self.allgather(ranks, f"open {name}")
        _check_groups(every)

        def split() -> MpiGroup:
            comm = self.comm.Split(color=ranks[0], key=ranks.index(self.rank))
            return MpiGroup(self, cast(MPI.Intracomm, comm), ranks, name)

        return in_time(self, split, f"open {name}")

    def wait(self, request: Any, what: str) -> None:
        start = time.monotonic()
        look, others = LOOK_SECONDS, None
        try:
            while not request.Test():
                waited = time.monotonic() - start
                # Also after the deadline: this process may not have run for a while.
                if others is None and waited > self.deadline - self.answer_seconds:
                    others = self.who_is_missing(what)
                elif waited > self.deadline:
                    raise DeadlineExceeded(self.rank, self.step, what, self.deadline, others or "")
                if waited > look:
                    look = waited + LOOK_SECONDS
                    self.answer(what)
                if waited > _SPIN_SECONDS:
                    time.sleep(50e-6)
                else:
                    os.sched_yield()
        except MPI.Exception as error:
            raise PeerLost(f"{self._lost_in(what)}: {error}") from error

    def close(self) -> None:
        if self.comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._roll_call.close()
        super().close()

    @property
    def answer_seconds(self) -> float:  # type: ignore[override]
        """How long before the deadline the others are asked what they are doing."""
        return min(ANSWER_SECONDS, self.deadline / 4)

    def answer(self, what: str) -> None:
        self._roll_call.answer(self._doing(what))

    def who_is_missing(self, what: str) -> str:
        return self._report(self._roll_call.ask(self._doing(what), self.answer_seconds))

    def _report(self, answers: Mapping[int, str]) -> str:
        said = report(self.size, self.rank, answers)
        stacks = where_they_are(self._processes, silent(self.size, self.rank, answers))
        return f"{said}\n{stacks}" if stacks else said

    def _lost_in(self, what: str) -> str:
        """Who has died, for an error message, as far as that is known."""
        dead = [rank for rank in self._dead() if rank != self.rank]
        whom = name_ranks(dead) if dead else "a peer"
        return f"rank {self.rank} lost {whom} at step {self.step} in {what!r}"

    def _dead(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank, process in self._processes.items() if has_ended(process)]

    def _doing(self, what: str) -> str:
        return f"at step {self.step} in {what!r}"


def _check_groups(every: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the lists by rank describe disjoint groups, each of which all members know."""
    for rank, ranks in enumerate(every):
        wrong = [other for other in ranks if not 0 <= other < len(every) or every[other] != ranks]
        if wrong or rank not in ranks or len(set(ranks)) < len(ranks):
            raise WorldError(
                f"the ranks do not agree on who is in a group: rank {rank} is to be in a group of "
                f"ranks {list(ranks)}, but the groups by rank are {[list(g) for g in every]}. "
                "Every rank must be in the group that it opens, and name the same ranks in the "
                "same order as the others of that group."
            )


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
