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

from ktrainer.config.launch_environment import NETWORK, listening_address, ports_on_interface
from ktrainer.distributed.deadlines import call_with_deadline
from ktrainer.distributed.listening_sockets import keep_at
from ktrainer.distributed.mpi_communicator import MpiComm, MpiGroup, keep_for_mpi
from ktrainer.distributed.mpi_progress import has_completed
from ktrainer.distributed.stack_dump import Process, enable_stack_dumps, has_ended, stack_dumps
from ktrainer.distributed.stall_report import (
    ANSWER_SECONDS,
    POLL_SECONDS,
    StallReport,
    silent_ranks,
    stall_message,
)
from ktrainer.distributed.world import ended_by
from ktrainer.errors import DeadlineExceeded, PeerLost, WorldError, name_ranks

_SPIN_SECONDS = 0.002  # poll without sleeping at first: most waits are microseconds
_LEAST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3  # seconds
_STARTUP = "start of all ranks"
_STARTUP_TAG = 32_000  # of messages among all processes, where the script may have its own
_STARTUP_SPIN_SECONDS = 0.05
_NARROW_SECONDS = 5.0  # how long to try to move listening sockets
_interrupted_by: BaseException | None = None  # the start of all ranks, before all had come


def keep_on_interface(comm: MPI.Comm) -> None:
    """Move MPI's listening sockets to the launch's interface, if it asked for that."""
    ports = ports_on_interface()
    if ports and not keep_at(listening_address(), ports, comm.Iprobe, _NARROW_SECONDS):
        text = (
            f"MPI of rank {comm.rank} listens on all interfaces, as its socket could not be moved; "
            f"let a firewall close the TCP ports {ports.start} to {ports.stop - 1}"
        )
        print(f"ktrainer: {text}", file=sys.stderr, flush=True)


class MpiWorld(MpiComm):
    """Ranks of `MPI.COMM_WORLD`, talking through a communicator of their own.

    Args:
        start_deadline: seconds to wait for all of them to open the world.

    Raises:
        DeadlineExceeded: naming the ranks that have not.
    """

    def __init__(self, start_deadline: float = 1800.0) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise WorldError(
                "this MPI was started without MPI_THREAD_MULTIPLE, which gradients and host "
                "messages that overlap need; start the script through `ktrainer run`, or "
                "leave mpi4py.rc.thread_level at 'multiple'"
            )
        _abort_on_uncaught_exceptions()
        # Before this rank connects to others: where both connect at once, MPI closes one
        # connection, and its port cannot be bound again for a minute.
        if NETWORK in os.environ:
            keep_on_interface(MPI.COMM_WORLD)
        startup_barrier(MPI.COMM_WORLD, start_deadline)
        super().__init__(MPI.COMM_WORLD.Dup())
        self._stall_report = StallReport(self.comm.Dup())
        self._processes: dict[int, Process] = {}
        self._processes |= enumerate(self.allgather(enable_stack_dumps(), "process of each rank"))

    def group(self, ranks: Sequence[int], name: str) -> MpiGroup:
        """A world of some of the ranks, this one among them.

        Every rank of this world must call it at the same time, each with the ranks of its own
        group; the groups are disjoint.

        Args:
            ranks: ranks of this world. Their order is that of the ranks in the group.
            name: what the group is, for error messages: `"the stages of replica 1"`.

        Raises:
            WorldError: on every rank, if the ranks of a group do not all name the same ones.
            DeadlineExceeded: a rank does not open it in time.
        """
        ranks = tuple(int(rank) for rank in ranks)
        every: list[tuple[int, ...]] = self.allgather(ranks, f"open {name}")
        _check_groups(every)

        def split() -> MpiGroup:
            comm = self.comm.Split(color=ranks[0], key=ranks.index(self.rank))
            return MpiGroup(self, cast(MPI.Intracomm, comm), ranks, name)

        return call_with_deadline(self, split, f"open {name}")

    def wait(self, request: Any, what: str, *buffers: Any) -> None:
        with self.waiting():
            self._wait(request, what, *buffers)

    def _wait(self, request: Any, what: str, *buffers: Any) -> None:
        start = time.monotonic()
        next_poll, others = POLL_SECONDS, None
        try:
            while not has_completed(request):
                waited = time.monotonic() - start
                # Also after the deadline: this process may not have run for a while.
                if others is None and waited > self.deadline - self.answer_seconds:
                    others = self.who_is_missing(what)
                elif waited > self.deadline:
                    raise DeadlineExceeded(
                        self.rank,
                        self.step,
                        what,
                        self.deadline,
                        others or "",
                        self.deadline_setting,
                    )
                if waited > next_poll:
                    next_poll = waited + POLL_SECONDS
                    self.answer(what)
                if waited > _SPIN_SECONDS:
                    time.sleep(pause_after(waited))
                else:
                    os.sched_yield()
        except MPI.Exception as error:
            raise PeerLost(f"{self._lost_in(what)}: {error}") from error
        finally:
            if request:  # MPI has not ended it: this is an exception's way out
                self.keep_unfinished(request, *buffers)

    def close(self) -> None:
        self.free(self._stall_report.comm)
        super().close()

    @property
    def answer_seconds(self) -> float:  # type: ignore[override]
        """Seconds before the deadline at which a stall report is made."""
        return min(ANSWER_SECONDS, self.deadline / 4)

    def answer(self, what: str) -> None:
        self._stall_report.answer(self._doing(what))

    def who_is_missing(self, what: str) -> str:
        return self._describe(self._stall_report.ask(self._doing(what), self.answer_seconds))

    def _describe(self, answers: Mapping[int, str]) -> str:
        said = stall_message(self.size, self.rank, answers)
        stacks = stack_dumps(self._processes, silent_ranks(self.size, self.rank, answers))
        return f"{said}\n{stacks}" if stacks else said

    def _lost_in(self, what: str) -> str:
        """Name the lost ranks, as far as they are known, for an error message."""
        lost = [rank for rank in self._lost_ranks() if rank != self.rank]
        whom = name_ranks(lost) if lost else "a peer"
        return f"rank {self.rank} lost {whom} at step {self.step} in {what!r}"

    def _lost_ranks(self) -> list[int]:
        """The ranks of this host whose processes have ended."""
        return [rank for rank, process in self._processes.items() if has_ended(process)]

    def _doing(self, what: str) -> str:
        return f"at step {self.step} in {what!r}"


def pause_after(waited: float) -> float:
    """Seconds until MPI is asked again: a rank that waits for long leaves the core to others.

    MPI moves a message only while it is asked, and some operations take many rounds of messages,
    each of which may wait for a pause to end: so pauses are short, at most 1 ms.
    """
    return min(max(waited / 200, _LEAST_PAUSE), _LONGEST_PAUSE)


def startup_barrier(comm: MPI.Intracomm, seconds: float) -> None:
    """Wait until all ranks open the world, at most `seconds`.

    Scripts prepare data before they make a Trainer, one rank perhaps for all, so this wait has a
    limit of its own. MPI's start, and its first communicator, have none.

    Raises:
        DeadlineExceeded: naming the ranks that have not.
        PeerLost: a rank has failed.
        WorldError: an earlier call has ended before all had come.
    """
    global _interrupted_by
    _check_never_interrupted(comm)
    began = time.monotonic()
    stall_report = StallReport(comm, _STARTUP_TAG)
    answer_seconds = min(ANSWER_SECONDS, seconds / 4)
    request, next_poll = None, 0.0
    try:
        request = comm.Ibarrier()
        while not request.Test():
            waited = time.monotonic() - began
            if waited > next_poll:
                next_poll = waited + POLL_SECONDS
                stall_report.answer("here")
            if waited > seconds - answer_seconds:
                answers = stall_report.ask("here", answer_seconds)
                if request.Test():  # all have arrived meanwhile, and some answer no more
                    return
                _raise_absent(comm, seconds, answers)
            time.sleep(1e-4 if waited < _STARTUP_SPIN_SECONDS else 1e-2)
    except MPI.Exception as error:
        raise PeerLost(
            f"rank {comm.rank} lost a peer at the start of all ranks: {error}"
        ) from error
    finally:
        if request:  # MPI has not ended it: this is an exception's way out
            _interrupted_by = sys.exception()
            keep_for_mpi(request, stall_report)


def _check_never_interrupted(comm: MPI.Intracomm) -> None:
    """Raise if an earlier startup barrier has ended before all ranks had come."""
    if (error := _interrupted_by) is not None:
        raise WorldError(
            f"rank {comm.rank} stopped waiting for the start of all ranks before all had come: its "
            "next operation would be taken for that one. Start all processes again. "
            f"{ended_by(error)}"
        ) from error


def _raise_absent(comm: MPI.Intracomm, seconds: float, answers: Mapping[int, str]) -> None:
    """Raise unless all answer: the last one has arrived just now."""
    missing = silent_ranks(comm.size, comm.rank, answers)
    if missing:
        not_there = (
            f"Not there: {name_ranks(missing)}, which did not come to `Trainer(...)`, or to where "
            "the world is opened otherwise: stopped, failed, busy before it, or on another path."
        )
        setting = "world.start_deadline"
        raise DeadlineExceeded(comm.rank, 0, _STARTUP, seconds, not_there, setting)


def _check_groups(every: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the lists by rank describe disjoint groups, each of which all members know."""
    for rank, ranks in enumerate(every):
        wrong = [other for other in ranks if not 0 <= other < len(every) or every[other] != ranks]
        if wrong or rank not in ranks or len(set(ranks)) < len(ranks):
            raise WorldError(
                f"the ranks do not agree on the members of a group: rank {rank} opens a group of "
                f"ranks {list(ranks)}, but the groups by rank are {[list(g) for g in every]}. "
                "Every rank must be in the group that it opens, and name the same ranks in the "
                "same order as the others of that group."
            )


def _abort_on_uncaught_exceptions() -> None:
    """Abort all ranks on an uncaught exception of this one.

    Otherwise the interpreter would end in MPI_Finalize, which waits for the others for ever.
    """
    report = sys.excepthook

    def abort(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = abort
