"""Rules that name what slows training, from the ranks' times.

Every few steps the ranks compare a `Window` each: by share of its time, the median over its steps,
which a single hiccup does not move. A cause is named when it is there in
`WINDOWS` windows in a row, once a `fit`, and again after it was away for long. Ranks that compute
longer are named when it lasts `LEAST_DURATION` as well: on a machine that others use too, a process
may lose its core for a moment.

    data            a rank waits for data for `logging.slow` of the time
    callback NAME   a callback takes as much
    cpu             a rank computes longer than the others, or steps take longer than before, as the
                    rank does not get its core
    memory          the same, as its memory is read from the disk
    compute         a rank computes longer than the others, and nothing shows why
    link            communication takes longer than before, though all ranks arrive together, or,
                    where it is a part of computing, the steps of all ranks; and a link is measured
                    to be slower than before
    waiting         over an epoch, others wait for one rank for twice `logging.slow` of the time

Each has a least time besides: what takes less is not worth a line.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ktrainer.state import slow_texts
from ktrainer.state.rank_times import Link, Window, is_longer, least_seconds, medians_of_others
from ktrainer.state.time_shares import CALLBACK, COMMUNICATION, WAITING

WINDOWS, WINDOWS_UNEXPLAINED = 2, 3  # in a row, before a cause is named
LEAST_DURATION, LEAST_DURATION_UNEXPLAINED = 0.1, 1.0  # seconds that a rank computes longer
LEAST_PAST, PAST = 5, 20  # windows that a rank's own past consists of
NEW_NORMAL = 40  # windows in a row, after which a longer time is the past
AGAIN = 100  # windows without a cause, after which it is named again
LINK_RATIO = 2.0  # to the past
LEAST_SECONDS = 0.01  # a step: of a wait for data, a callback or communication
LEAST_EPOCH_SECONDS = 1.0

Key = tuple[str, int | None]


@dataclass(frozen=True)
class Slow:
    """Something slow that was named.

    Attributes:
        step: at which it was named.
        rank: that is slow; None: a link between ranks.
        cause: as in the list above.
        message: for people: what, why, and what to do.
    """

    step: int
    rank: int | None
    cause: str
    message: str


@dataclass(frozen=True)
class _Cause:
    """Something that may be slow in a window.

    Attributes:
        key: by which it is the same in the next window.
        windows: in a row, before it is named.
        duration: seconds that these take at least.
    """

    key: Key
    rank: int | None
    name: str
    text: str
    windows: float = WINDOWS
    duration: float = 0.0


@dataclass(frozen=True)
class _Streak:
    """Windows in a row that have a cause, and the seconds that they took."""

    windows: int = 0
    seconds: float = 0.0


class SlowRules:
    """Names what is slow. All ranks apply the rules to the same windows.

    Args:
        share: `logging.slow`.
        compares: whether ranks have equal work, and their communication is known.
        several_hosts: whether ranks are on several hosts.
        waits_hidden: whether communication is not known, and waits are a part of computing.

    Attributes:
        suspects: what was slow in the last window and has not been named: a kind (`data`,
            `callback NAME`, `compute`, `link`), and for `compute` the rank.
    """

    def __init__(
        self,
        share: float,
        compares: bool = False,
        several_hosts: bool = False,
        waits_hidden: bool = False,
    ) -> None:
        self.share, self._compares = share, compares
        self._several_hosts, self._waits_hidden = several_hosts, waits_hidden
        self._windows = 0
        self._named: dict[Key, int] = {}  # the last window with it
        self._ranks_named: set[int | None] = set()
        self.suspects: set[Key] = set()
        self._streaks: dict[Key, _Streak] = {}
        self._past: defaultdict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=PAST))

    def judge(self, step: int, ranks: Sequence[Window], link: Link | None = None) -> list[Slow]:
        """Compare a window of each rank; return what is named.

        Args:
            link: the slowest one; None: links were not measured.
        """
        self._windows += 1
        self._longer_steps: set[Key] = set()  # with or without a reason
        shares = list(self._large_shares(ranks))
        causes = [*shares, *self._long_computing(ranks, {cause.rank for cause in shares})]
        explained = any(c.key[0] == "compute" and c.windows < math.inf for c in causes)
        causes += self._slow_link(ranks, link, explained)
        seconds = max(window.duration for window in ranks)
        before = {cause.key: self._streaks.get(cause.key, _Streak()) for cause in causes}
        self._streaks = {
            key: _Streak(streak.windows + 1, streak.seconds + seconds)
            for key, streak in before.items()
        }
        found = [c for c in causes if self._has_lasted(c) and self._is_new(c.key)]
        known = [cause for cause in causes if cause in found or not self._is_new(cause.key)]
        self._named |= {cause.key: self._windows for cause in known}
        self._ranks_named |= {cause.rank for cause in found}
        self.suspects = {k for k in {c.key for c in causes} | self._longer_steps if self._is_new(k)}
        return [Slow(step, cause.rank, cause.name, cause.text) for cause in found]

    def judge_epoch(
        self, step: int, epoch: int, ranks: Sequence[Mapping[str, float]], stages: Sequence[str]
    ) -> Slow | None:
        """The cause that stands out most in an epoch, if it has not been named.

        Args:
            epoch: its number, from 1.
            ranks: `seconds` of each rank, and of these by share.
            stages: the slow stage of each rank's input; empty: not looked for.
        """
        causes = [
            (seconds / max(row["seconds"], 1e-9), seconds, share, rank)
            for rank, row in enumerate(ranks)
            for share, seconds in row.items()
            if seconds >= LEAST_EPOCH_SECONDS
        ]
        for part, seconds, share, rank in sorted(causes, reverse=True):
            text = self._epoch_text(epoch, share, rank, part, seconds, ranks, stages)
            key = (share, None)
            if text and self._is_new(key):
                self._named[key] = self._windows
                waits = share.startswith(WAITING)
                slow = int(share.removeprefix(WAITING)) if waits else rank
                self._ranks_named.add(slow)
                return Slow(step, slow, "waiting" if waits else share, text)
        return None

    def _epoch_text(
        self,
        epoch: int,
        share: str,
        rank: int,
        part: float,
        seconds: float,
        ranks: Sequence[Mapping[str, float]],
        stages: Sequence[str],
    ) -> str:
        """The message about a share of an epoch; empty: there is none."""
        if share == "data" and part >= self.share:
            return slow_texts.data(f"in epoch {epoch} ", rank, len(ranks), part, stages[rank])
        if share.startswith(CALLBACK) and part >= self.share:
            return slow_texts.callback_in_epoch(epoch, share, rank, len(ranks), part, seconds)
        if not share.startswith(WAITING) or part < 2 * self.share:
            return ""
        slow = int(share.removeprefix(WAITING))
        if self._ranks_named & {slow, None}:  # a rank or a link, which is why they wait
            return ""
        return slow_texts.wait_in_epoch(epoch, rank, slow, part, seconds)

    def _has_lasted(self, cause: _Cause) -> bool:
        streak = self._streaks[cause.key]
        return streak.windows >= cause.windows and streak.seconds >= cause.duration

    def _is_new(self, key: Key) -> bool:
        """Whether something has not been named, or has been away since."""
        return key not in self._named or self._windows - self._named[key] > AGAIN

    # -- causes

    def _large_shares(self, ranks: Sequence[Window]) -> Iterator[_Cause]:
        """Waits for data and callbacks, on the rank with the longest."""
        shares = {share for window in ranks for share in window.seconds}
        for share in sorted(s for s in shares if s == "data" or s.startswith(CALLBACK)):
            all_seconds = [window.seconds.get(share, 0.0) for window in ranks]
            seconds = max(all_seconds)
            rank = all_seconds.index(seconds)
            part = min(1.0, seconds / max(ranks[rank].step_seconds, 1e-9))
            if seconds < LEAST_SECONDS or part < self.share:
                continue
            if share == "data":
                stage = ranks[rank].stage
                text = slow_texts.data("", rank, len(ranks), part, stage)
            else:
                alike = len(ranks) > 1 and min(all_seconds) > seconds / 2
                text = slow_texts.callback(share, seconds, part, rank, len(ranks), alike)
            yield _Cause((share, None), rank, share, text)

    def _long_computing(self, ranks: Sequence[Window], late: set[int | None]) -> Iterator[_Cause]:
        """Ranks that compute longer than the others; and, where they are short of processors or
        memory, ranks whose steps take longer than before.

        Args:
            late: ranks that wait for data or a callback.
        """
        computing = [window.seconds.get("compute", 0.0) for window in ranks]
        communication = self._work_of_communication(ranks)
        least = min((w.cpu for w in ranks if w.cpu is not None), default=None)
        medians = medians_of_others(computing) if self._compares else [math.inf] * len(ranks)
        for rank, (window, usual) in enumerate(zip(ranks, medians, strict=True)):
            mine, sums = computing[rank], communication[rank]
            before = self._add_to_past(("compute", rank), mine + sums)
            excess = 2 * self.share * window.step_seconds
            name, why = slow_texts.reason(window.cpu, least, window.faults)
            short, blameless = name == "cpu", self._blames_another(rank, len(ranks), late)
            slower = is_longer(mine, usual, excess, short)
            slowed = is_longer(mine + sums, before, excess, short)
            if not blameless and is_longer(mine + sums, before, excess, short_of_processors=True):
                self._longer_steps.add(("compute", rank))
            if not slower and (not slowed or blameless):
                continue
            who = f"rank {rank}" if len(ranks) > 1 else "the process"
            text = slow_texts.longer_than_before(who, mine + sums, before, why)
            if slower:
                text = slow_texts.longer_than_others(who, mine, usual, why)
            yield _cause_of_computing(rank, name, text, slower)

    def _work_of_communication(self, ranks: Sequence[Window]) -> list[float]:
        """Seconds of each rank that belong to its computing: all but waits for others and for the
        network; where waits are in both, all, as steps of ranks are about as long then."""
        if self._several_hosts:
            return [0.0] * len(ranks)
        if self._waits_hidden:
            return [window.seconds.get(COMMUNICATION, 0.0) for window in ranks]
        return [least_seconds(ranks, COMMUNICATION)] * len(ranks)

    def _add_to_past(self, key: Key, seconds: float) -> float:
        """Add `seconds` to the past if they are about as long, or have been longer for a while.

        Returns:
            The median of the past before that; infinity: there is not enough of it.
        """
        past = self._past[key]
        before = median(past) if len(past) >= LEAST_PAST else math.inf
        lasting = self._streaks.get(key, _Streak()).windows >= NEW_NORMAL
        if lasting or not is_longer(seconds, before):
            past.append(seconds)
        return before

    def _blames_another(self, rank: int, ranks: int, late: set[int | None]) -> bool:
        """Whether steps are known to be long because of another rank."""
        if self._waits_hidden and late - {rank}:
            return True
        others = [("compute", other) for other in range(ranks) if other != rank]
        return any(key in self._streaks and not self._is_new(key) for key in others)

    def _slow_link(
        self, ranks: Sequence[Window], link: Link | None, explained: bool
    ) -> Iterator[_Cause]:
        """Communication, or steps that it is hidden in, that takes longer than before on the rank
        that waits least.

        Args:
            explained: some rank is the reason.
        """
        if not self._several_hosts or explained:
            return
        key, hidden = ("link", None), self._waits_hidden
        shares = (COMMUNICATION, "compute") if hidden else (COMMUNICATION,)
        seconds = least_seconds(ranks, *shares)
        before = self._add_to_past(key, seconds)
        slower = is_longer(seconds, before) if hidden else seconds >= LINK_RATIO * before
        if not slower or seconds - before < LEAST_SECONDS:
            return
        # It may take longer for other reasons, as on a busy machine.
        is_sure = link is not None and link.slower
        text = slow_texts.slow_link(seconds, before, link.text if link else "", hidden)
        yield _Cause(key, None, "link", text, WINDOWS if is_sure else math.inf)


def _cause_of_computing(rank: int, name: str, text: str, slower: bool) -> _Cause:
    """The cause of long computing. If nothing shows why, it has to last longer before it is named,
    and is not where the others compute as long."""
    key = ("compute", rank)
    if name != "compute":
        return _Cause(key, rank, name, text, WINDOWS, LEAST_DURATION)
    windows = WINDOWS_UNEXPLAINED if slower else math.inf
    return _Cause(key, rank, name, text, windows, LEAST_DURATION_UNEXPLAINED)
