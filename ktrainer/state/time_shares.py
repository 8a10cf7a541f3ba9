"""Wall time of one rank by what it was spent on.

| share | time in |
|---|---|
| `start-up` | opening data, tracing the model, the first update, and waits for others in it |
| `data` | waiting for the next batch |
| `compute` | the step, or the body of a loop of the user's own, without communication |
| `communication` | collectives of the step, and of decisions that ranks make together |
| `waiting for rank 1` | the part of these in which all other ranks waited for this one |
| `waiting before ranks changed` | the same, for a rank that has had another number since |
| `callback NAME` | the events of a callback, by its class |
| `validation`, `checkpoint` | these, without their communication |
| `healing` | recovery from lost ranks and what it prepares, communication included |
| `metrics` | metrics of all ranks for logs, without the communication |
| `loop` | what is left: the training loop itself |
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ktrainer.state.trace_spans import LOOP, add_span

START = "start-up"
COMMUNICATION = "communication"
WAITING = "waiting for rank "
WAITED = "waiting before ranks changed"
CALLBACK = "callback "
HEALING = "healing"


class TimeShares:
    """A clock whose time goes to one share at a time: the innermost one that is open.

    Its first share is `start-up`. Belongs to the thread that makes it.

    Args:
        began: the moment from which on it counts, by `time.perf_counter`; None: now.

    Attributes:
        seconds: by share, up to the last change; `read` has those of now.
        taken: those of them that `take` has returned.
    """

    def __init__(self, began: float | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.taken: dict[str, float] = {}
        self._open = [START]
        self._begins: list[float] = []  # of all shares that are open but the first
        self._spans: dict[str, _Span] = {}
        self._thread = threading.get_ident()
        self._since = time.perf_counter() if began is None else began

    def of(self, share: str) -> _Span:
        """A context whose time belongs to `share`, but for what is opened inside it."""
        span = self._spans.get(share)
        if span is None:
            span = self._spans[share] = _Span(self, share)
        return span

    @property
    def in_this_thread(self) -> bool:
        """Whether the present thread is the one whose time this is."""
        return threading.get_ident() == self._thread

    def rest_is(self, share: str) -> None:
        """From now on, time outside of all contexts belongs to `share`."""
        self.read()
        self._open[0] = share

    def read(self) -> dict[str, float]:
        """A copy of the seconds by share, up to now."""
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now
        return dict(self.seconds)

    def take(self) -> dict[str, float]:
        """`seconds` since this was last called, and how many of them each share took."""
        before, self.taken = self.taken, self.read()
        row = {share: value - before.get(share, 0.0) for share, value in self.taken.items()}
        return {"seconds": sum(row.values())} | {s: value for s, value in row.items() if value > 0}

    @contextmanager
    def taking(self) -> Iterator[dict[str, float]]:
        """`take`, undone if the block fails: the next one then returns these seconds, too."""
        before = self.taken
        try:
            yield self.take()
        except BaseException:
            self.taken = before
            raise

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some of a share's seconds, at most those that it has, as another's."""
        moved = min(seconds, self.seconds[source])
        if moved > 0:
            self.seconds[source] -= moved
            self.seconds[target] += moved

    def enter(self, share: str) -> None:
        """Open a share; what waits for other ranks at the start, and all inside of healing, is part
        of these."""
        now, last = time.perf_counter(), self._open[-1]
        self.seconds[last] += now - self._since
        self._since = now
        if last == HEALING or (share == COMMUNICATION and self._open[0] == START):
            share = last if last == HEALING else START
        self._open.append(share)
        self._begins.append(now)

    def leave(self) -> None:
        """Close the share that was opened last."""
        now, share = time.perf_counter(), self._open.pop()
        self.seconds[share] += now - self._since
        self._since = now
        add_span(LOOP, share, self._begins.pop(), now)


class _Span:
    """The context of one share, used again and again: it has no state of its own."""

    __slots__ = ("_share", "_times")

    def __init__(self, times: TimeShares, share: str) -> None:
        self._times, self._share = times, share

    def __enter__(self) -> None:
        self._times.enter(self._share)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._times.leave()


def communication_of(seconds: dict[str, float]) -> float:
    """Seconds in communication, waits for other ranks included."""
    return sum(
        value
        for share, value in seconds.items()
        if share == COMMUNICATION or share.startswith(WAITING)
    )
