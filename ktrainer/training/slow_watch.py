"""Compare the ranks' times: every few steps to name what is slow, and after each epoch.

A window is due after `LEAST_STEPS` steps and `LEAST_SECONDS`, or later where many ranks make a
comparison expensive, by any rank's clock: the ranks agree on that with the vote on whether to stop.
Where nothing is suspect, and steps are as long as in the last window, it is twice as long.
Then they gather their windows, and all apply `ktrainer.state.slowness` to them. A window has the
processor time of the rank from its first longer step on, or from its begin where a rank is suspect.
Where something is suspect, the next window has what would explain it: the slow stage of the input,
the speed of links. These are measured in the first window too, and beyond a few times as rarely as
windows are compared. The same message carries warnings to rank 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from ktrainer.callbacks.base import emit
from ktrainer.runtime.process_usage import disk_faults, processor_share, processor_time
from ktrainer.state.rank_times import Link, Window, waits_for_last
from ktrainer.state.slowness import LEAST_EPOCH_SECONDS, LINK_RATIO, Slow, SlowRules
from ktrainer.state.time_shares import COMMUNICATION, WAITED, WAITING, communication_of
from ktrainer.state.warning_log import NotedWarning

if TYPE_CHECKING:
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.context import RunContext

LEAST_STEPS, LEAST_SECONDS = 3, 0.04
TIME_PER_COST = 150  # seconds of training for each of comparing
LEAST_SHARE_SECONDS = 1e-4  # of a step
_LONGER = 1.25  # times the usual step, after which a comparison is not put off
_LEAST_PROCESSOR_WAIT = 0.15  # of the time: steps that are 1.5 times as long lose a third of it
_FREE_MEASURES, _FREE_SECONDS = 3, 0.1  # of links, beyond 1 / `TIME_PER_COST` of the time
_MOST_MARKS = 8  # of short steps the first ones of a window will do


@dataclass(frozen=True)
class _Mark:
    """The times after a call of the program.

    Attributes:
        at: the time of it.
        updates: that the call has made.
        seconds: by share, so far.
        faults: pages that were read from the disk, so far.
    """

    at: float
    updates: int
    seconds: Mapping[str, float]
    faults: int


@dataclass(frozen=True)
class _Usage:
    """Processor time of this rank at a time.

    Attributes:
        at: the time.
        processors: as of `processor_time`.
    """

    at: float
    processors: tuple[int, int]

    @classmethod
    def now(cls) -> _Usage:
        return cls(time.perf_counter(), processor_time())


class SlowWatch:
    """The times of one `fit`, compared over its ranks.

    Args:
        context: of the call.
        state: of the run.
    """

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self._context, self._world = context, context.world
        self._state, self._times = state, state.times
        self._costs: deque[float] = deque([0.0], maxlen=20)  # seconds of the last comparisons
        self._begin()

    def _begin(self) -> None:
        """Begin with the present ranks."""
        context, world = self._context, self._world
        known = context.backend.communication_seconds is not None
        self._several_hosts = world.local_size < world.size
        self._speeds: Any = None  # of links, in the first window
        self._began, self._measured = time.perf_counter(), 0.0  # seconds that links were measured
        self._most_measured = 0.0  # seconds, at one time
        self._rules: SlowRules | None = None
        if (share := context.config.logging.slow) is not None:
            self._rules = SlowRules(
                share,
                compares=known and world.replicas == world.size,
                several_hosts=self._several_hosts,
                waits_hidden=not known,
            )
        self._apportioned = communication_of(self._times.seconds)  # up to the last gathering
        self._usual = 0.0  # seconds of a step in the last window
        self._restart()

    def _restart(self, usage: _Usage | None = None) -> None:
        """Begin a window."""
        self._usage, self._measuring_usage = usage, 0.0  # seconds that measuring it took
        self._marks, self._steps = [self._mark_of(0)], 0
        self._has_longer = False  # whether an update took longer than usual

    def ranks_changed(self) -> None:
        """Start over with the present ranks, on all of them: they have other numbers now."""
        for share in [share for share in self._times.seconds if share.startswith(WAITING)]:
            seconds = self._times.seconds[share] - self._times.taken.get(share, 0.0)
            self._times.move(share, WAITED, seconds)
        self._begin()

    def mark(self, updates: int) -> None:
        """Note the times after some updates. The first longer ones of a window begin it: a window
        of which a part is as usual shows less of what has become slow."""
        self._steps += updates
        if self._rules is None or len(self._marks) == _MOST_MARKS:
            return
        last, now = self._marks[-1], self._mark_of(updates)
        is_longer = now.at - last.at > _LONGER * self._usual * updates
        if is_longer and not self._has_longer and self._usage is None:
            self._marks, self._steps = [last], updates
            self._usage = _Usage.now()
            self._measuring_usage = time.perf_counter() - now.at
        self._has_longer |= is_longer
        self._marks.append(now)

    def _mark_of(self, updates: int) -> _Mark:
        return _Mark(time.perf_counter(), updates, self._times.read(), disk_faults())

    @property
    def due(self) -> bool:
        """Whether this rank's window is long enough."""
        if self._rules is None or self._steps < LEAST_STEPS:
            return False
        seconds = time.perf_counter() - self._marks[0].at
        least = max(LEAST_SECONDS, TIME_PER_COST * min(self._costs))
        is_usual = not self._rules.suspects and seconds <= _LONGER * self._usual * self._steps
        return seconds >= (2 * least if is_usual else least)

    def compare(self, callbacks: Iterable[Any]) -> None:
        """Compare the windows of all ranks, which call this together; tell callbacks what is
        slow."""
        assert self._rules is not None
        rules, world, began = self._rules, self._world, time.perf_counter()
        asks_for_link = ("link", None) in rules.suspects and self._may_measure()
        with self._taking_warnings() as warnings:
            mine = (self._communication(), asks_for_link, self._window(), warnings)
            every = [mine] if world.size == 1 else world.allgather(mine, "times of the last steps")
        communication, asks, windows, warned = zip(*every, strict=True)
        self._hear(warned)
        before_links = time.perf_counter()
        link = self._measure_links(any(asks)) if self._several_hosts else None
        measuring = time.perf_counter() - before_links
        self._measured += measuring
        self._most_measured = max(self._most_measured, measuring)
        self._apportion(communication)  # without what measuring has added to it
        found = rules.judge(self._state.progress.step, windows, link)
        self._usual = (began - self._marks[0].at) / self._steps
        usage = self._usage_of_suspects(rules)
        self._say(found, callbacks)
        began -= self._measuring_usage
        self._restart(usage)
        self._costs.append(self._marks[0].at - began - measuring)

    def end_epoch(self, epoch: int, callbacks: Iterable[Any]) -> None:
        """`gather`, and name what stands out."""
        rows, stages = self.gather(epoch, callbacks)
        usage = None
        if self._rules is not None:
            step = self._state.progress.step
            found = self._rules.judge_epoch(step, epoch + 1, rows, stages)
            self._say([found] if found is not None else [], callbacks)
            usage = self._usage_of_suspects(self._rules)
        self._restart(usage)

    def gather(
        self, epoch: int, callbacks: Iterable[Any]
    ) -> tuple[list[dict[str, float]], list[str]]:
        """Gather the times since this was last called, and the slow stages of inputs; tell
        callbacks the times. All ranks call this together."""
        world = self._world
        self._apportion(world.allgather(self._communication(), "communication of an epoch"))
        with self._times.taking() as row, self._taking_warnings() as warnings:
            mine = (row, self._stage_of_epoch(row), warnings)
            every = world.allgather(mine, "times of an epoch")
        rows, stages, warned = map(list, zip(*every, strict=True))
        self._hear(warned)
        emit(callbacks, "on_times", epoch, rows)
        return rows, stages

    # -- this rank's part

    def _window(self) -> Window:
        rules, marks = self._rules, self._marks
        assert rules is not None
        waits = ("data", None) in rules.suspects
        return Window(
            {share: _median(marks, share) for share in _large(marks)},
            median((b.at - a.at) / b.updates for a, b in pairwise(marks)),
            time.perf_counter() - marks[0].at,
            self._processor_share(),
            (disk_faults() - marks[0].faults) / self._steps,
            self._state.feed.slow_stage() if waits else None,
        )

    def _usage_of_suspects(self, rules: SlowRules) -> _Usage | None:
        """That of all ranks where one is suspect: it may wait, unseen, for another."""
        suspect = any(kind == "compute" for kind, _ in rules.suspects)
        return _Usage.now() if suspect else None

    def _processor_share(self) -> float | None:
        """The part that this rank got of the processor time that its threads asked for; None where
        no step was longer, or its threads have waited for little: one that itself waits, for the
        network or another rank, gets a small part of the little that it asks for."""
        if self._usage is None:
            return None
        share, waited = processor_share(self._usage.processors)
        seconds = time.perf_counter() - self._usage.at
        return share if waited >= _LEAST_PROCESSOR_WAIT * seconds else None

    def _stage_of_epoch(self, row: Mapping[str, float]) -> str:
        """The slow stage of the input, if steps have waited for it."""
        rules, wait = self._rules, row.get("data", 0.0)
        if rules is None or wait < max(LEAST_EPOCH_SECONDS, rules.share * row["seconds"]):
            return ""
        return self._state.feed.slow_stage() or ""

    def _measure_links(self, suspect: bool) -> Link | None:
        """The slowest link, if one is suspect: compared with the first window."""
        from ktrainer.distributed.link_speed import link_speeds, slow_link

        if self._speeds is None:
            self._speeds = link_speeds(self._world)
        if not suspect:
            return None
        return Link(*slow_link(self._world, self._speeds, LINK_RATIO))

    def _may_measure(self) -> bool:
        """Whether measuring the links again costs little: steps may take longer for other reasons,
        again and again."""
        affordable = (time.perf_counter() - self._began) / TIME_PER_COST
        free = max(_FREE_SECONDS, _FREE_MEASURES * self._most_measured)
        return self._measured <= affordable + free

    # -- warnings

    def _taking_warnings(self) -> AbstractContextManager[list[NotedWarning]]:
        """Those of this rank that rank 0 does not know."""
        return nullcontext([]) if self._world.is_root else self._state.warnings.taking()

    def _hear(self, every: Sequence[Sequence[NotedWarning]]) -> None:
        if self._world.is_root and any(every):
            self._state.warnings.add_from_ranks(every)

    # -- waits for other ranks

    def _communication(self) -> float:
        """Seconds in communication since this was last gathered."""
        return communication_of(self._times.seconds) - self._apportioned

    def _apportion(self, communication: Sequence[float]) -> None:
        """Count the part of this rank's communication in which it waited for the last rank."""
        last, waits = waits_for_last(communication)
        self._times.move(COMMUNICATION, f"{WAITING}{last}", waits[self._world.rank])
        self._apportioned = communication_of(self._times.read())

    def _say(self, found: list[Slow], callbacks: Iterable[Any]) -> None:
        for slow in found:
            self._state.slow.append(slow)
            emit(callbacks, "on_slow", slow)


def _large(marks: Sequence[_Mark]) -> list[str]:
    """The shares that are worth a comparison."""
    before, after = marks[0].seconds, marks[-1].seconds
    least = LEAST_SHARE_SECONDS * sum(mark.updates for mark in marks[1:])
    return [s for s, seconds in after.items() if seconds - before.get(s, 0.0) > least]


def _median(marks: Sequence[_Mark], share: str) -> float:
    """Seconds of one update."""
    return median(
        (b.seconds.get(share, 0.0) - a.seconds.get(share, 0.0)) / b.updates
        for a, b in pairwise(marks)
    )
