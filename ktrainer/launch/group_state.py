"""The launcher's view of a group of ranks: which have started, may be lost, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ktrainer.errors import name_ranks
from ktrainer.launch.rank_channel import Note

STACK_SIGNAL = signal.SIGUSR2  # a rank's fault handler writes its stack on it
NOTICE_SECONDS = 60.0  # then the user is shown which ranks are missing
STACK_SECONDS = 0.5


@dataclass
class GroupEnd:
    """The end of a group.

    Attributes:
        code: mpirun's exit code.
        started: whether any rank began to run the script.
        mpirun_output: what mpirun itself printed.
        failures: rank -> the failure that it reported.
        interrupted: the report of a rank that was asked to end and did so, as then all do.
        silent: ranks that started and ended without a report, in that order.
        missed: the first of them that the others of a group that heals cannot continue without.
        late: why ranks that waited for others to start were ended; empty: they were not.
        lost: rank -> its host, for ranks on hosts that could not be reached afterwards.
        absent: the ranks that they waited for.
        faults: rank -> stack of a crash.
        stopped_by: the signal that this process got, or `"timeout"`, or None.
        ended: ranks that reached the end of the script.
        history: path of the run's record; None before training has begun.
        saved: whether it was stopped before a restart that would have resumed from a checkpoint.
    """

    code: int = 0
    started: bool = False
    mpirun_output: str = ""
    failures: dict[int, Note] = field(default_factory=dict)
    interrupted: Note | None = None
    silent: list[int] = field(default_factory=list)
    missed: int | None = None
    late: str = ""
    lost: dict[int, str] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    stopped_by: int | str | None = None
    ended: set[int] = field(default_factory=set)
    history: str | None = None
    saved: bool = False


@dataclass
class StartupWatch:
    """The wait at the start: MPI's own would last for ever, and handle no signal.

    Args:
        ranks: the world size.
    """

    ranks: int
    _arrived: set[int] = field(default_factory=set)
    _first: int = 0
    _since: float = 0.0
    _seconds: float = 0.0
    _noticed: bool = False

    def record(self, rank: int, seconds: float) -> None:
        """Record that a rank opens the world, and how long it waits for the others. Ranks that
        join later are not waited for."""
        if rank >= self.ranks:
            return
        if not self._arrived:
            self._first, self._since = rank, time.monotonic()
        self._arrived.add(rank)
        self._seconds = max(seconds, self._seconds)

    @property
    def missing(self) -> list[int]:
        """The ranks that others wait for."""
        if not self._arrived:
            return []
        return [rank for rank in range(self.ranks) if rank not in self._arrived]

    def notice(self) -> str | None:
        """A message for the user, once, when the wait is long."""
        if self._noticed or not self.missing or self._waited < NOTICE_SECONDS:
            return None
        self._noticed = True
        return (
            f"rank {self._first} has waited {NOTICE_SECONDS:g} s for {name_ranks(self.missing)} to "
            f"come to `Trainer(...)`; after {self._seconds:g} s (world.start_deadline) all are "
            "ended"
        )

    def late(self, ended: Collection[int]) -> str | None:
        """The reason to end all ranks, once some have waited too long.

        Args:
            ended: ranks that reached the end of the script.
        """
        if not self.missing or self._waited < self._seconds:
            return None
        never = [rank for rank in self.missing if rank in ended]
        more = f"; {name_ranks(never)} came to the end of the script without it" if never else ""
        return (
            f"rank {self._first} waited {self._seconds:g} s for {name_ranks(self.missing)} to come "
            f"to `Trainer(...)`, or to where the world is opened otherwise{more}. If it may take "
            "that long, raise world.start_deadline"
        )

    def dump_stacks(self, processes: Mapping[int, int]) -> None:
        """Make the missing ranks write their stacks.

        Args:
            processes: rank -> process id.
        """
        for rank in self.missing:
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(processes[rank], STACK_SIGNAL)
        time.sleep(STACK_SECONDS)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._since


class HealingPhases:
    """The phase of the script that each rank of a group that heals is in.

    mpirun, told to mitigate failures, does not end the other ranks. They can continue without a
    lost rank only between the first step and the end of `fit`.

    Args:
        first: how many processes were started; those that join later have higher numbers.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._phase: dict[int, int] = {}

    def record(self, note: Note) -> None:
        """Record the phase that a rank, and perhaps others with it, has entered."""
        for rank in note.stable_ranks:
            self._phase[rank] = max(note.number, self._phase.get(rank, 0))

    def may_lose(self, rank: int) -> bool:
        """Return whether the others continue without this rank, which may not have joined yet."""
        phase = self._phase.get(rank, 0)
        return phase % 2 == 1 or (phase == 0 and rank >= self._first)

    def never_joined(self, rank: int) -> bool:
        """Return whether this rank was to join the others, and has not."""
        return rank >= self._first and self._phase.get(rank, 0) == 0

    def missed(self, silent: Iterable[int]) -> int | None:
        """The first of these ranks that the others cannot continue without."""
        return next((rank for rank in silent if not self.may_lose(rank)), None)


class GroupState:
    """The ranks of a group, by what they report and how they end.

    Args:
        ranks: how many were started; those that join later have higher numbers.
        heals: whether ranks may join later, and may be lost.

    Attributes:
        started: rank -> process id, of those that have begun.
        startup: the wait for others at the start.
        end: how the group ends, as far as that is known.
    """

    def __init__(self, ranks: int, heals: bool) -> None:
        self._first = ranks
        self.started: dict[int, int] = {}
        self.startup = StartupWatch(ranks)
        self.end = GroupEnd()
        self._phases = HealingPhases(ranks) if heals else None
        self._graces: dict[int, float] = {}

    @property
    def heals(self) -> bool:
        """Whether the others may continue when a rank is lost."""
        return self._phases is not None

    @property
    def running(self) -> set[int]:
        """Ranks that have started, and not ended in any way."""
        return set(self.started) - self._over

    @property
    def all_ended(self) -> bool:
        """Whether every rank that was started has reached the end of the script."""
        return len(self.end.ended) == self._first

    @property
    def asked_to_end(self) -> bool:
        """Whether this process or a rank was asked to end."""
        return self.end.stopped_by is not None or self.end.interrupted is not None

    @property
    def _over(self) -> set[int]:
        return self.end.ended | set(self.end.failures) | set(self.end.silent)

    def record(self, rank: int, note: Note) -> None:
        """Record what a rank reports of itself."""
        if note.event == "started":
            self.started[rank] = note.pid
            self.end.started = True
        elif note.event == "grace":
            self._graces[rank] = note.seconds
        elif note.event == "startup":
            self.startup.record(rank, note.seconds)
        elif note.event == "history":
            self.end.history = note.text
        elif note.event == "phase":
            if self._phases is not None:
                self._phases.record(note)
        elif note.event == "failed":
            self.end.failures[rank] = note
        elif note.event == "interrupted":
            self.end.interrupted = note
        elif note.event == "ended":
            self.end.ended.add(rank)

    def record_end(self, rank: int) -> None:
        """Record that a rank has ended, perhaps without a report."""
        if rank not in self._over:
            self.end.silent.append(rank)

    def find_missed(self) -> None:
        """Record the first lost rank that the others need, unless all are being ended."""
        if self._phases is not None and self.end.missed is None and not self.asked_to_end:
            self.end.missed = self._phases.missed(self.end.silent)

    def joining_alone(self) -> set[int]:
        """Processes that are still to join ranks of which none is left; empty while one is."""
        joining = self._phases is not None and all(map(self._phases.never_joined, self.running))
        return self.running if self.end.ended and joining else set()

    def is_spare(self, rank: int) -> bool:
        """Return whether the others continue without the rank: it was started to join them."""
        return rank >= self._first and (self._phases is None or self._phases.may_lose(rank))

    def grace(self, default: float) -> float:
        """Seconds that all ranks need to end: the most that one has reported."""
        return max(self._graces.values(), default=default)
