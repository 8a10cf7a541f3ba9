"""The record of a run that is read on as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ktrainer.runs.run_curves import is_number, metric_order
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import RETURNS, ROWS, Event, decode, place

MOST_POINTS = 2000  # of a metric; half of them are then left out
_AT_ONCE = 8 * 2**20  # bytes; of more, some of the logged rows are left out
_LOG = b'{"event": "log"'
_RATE_ROWS = 12  # of logged rows, whose steps per second are shown

Point = tuple[int, float]  # step, value


class LiveRecord(RunRecord):
    """One run, whose record may grow. Only reads.

    Args:
        folder: of the run.

    Attributes:
        curves: by metric, its values in the last call of `fit`, thinned out where there are many.

    Raises:
        ConfigError: it is no run's folder, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._offset, self._fit = 0, (1, 0)
        self._first = b""  # its first line, by which a record is known
        self._timed: list[tuple[int, float]] = []  # step and seconds of the newest rows
        self.curves: dict[str, list[Point]] = {}
        super().__init__(folder)

    def _read(self, logs: bool) -> None:
        self.update()

    def update(self) -> bool:
        """Read what has been added; return whether anything has.

        Raises:
            OSError: the record cannot be read.
        """
        self._forget()
        if not self.file.exists():
            return False
        with self.file.open("rb") as file:
            first, size = file.readline(), file.seek(0, 2)
            if size < self._offset or (self._offset and first != self._first):  # another record
                self._offset, self.events, self.curves, self._timed = 0, [], {}, []
            self._first = first
            file.seek(self._offset)
            every = 1 + (size - self._offset) // _AT_ONCE
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                if number % every and line.startswith(_LOG) and size - self._offset > _AT_ONCE // 8:
                    continue
                if (event := decode(line)) is not None:
                    self._add(event)
        return True

    def _forget(self) -> None:
        """Forget what was derived from the events before."""
        for name in list(self.__dict__):
            if isinstance(getattr(type(self), name, None), cached_property):
                del self.__dict__[name]

    def _add(self, event: Event) -> None:
        kind = event["event"]
        if self.events and kind == "log" == self.events[-1]["event"]:
            self.events.pop()  # of logged rows the curves hold the values
        if not event.get("inside"):
            if place(event) != self._fit:
                self._fit, self.curves, self._timed = place(event), {}, []
            if kind in ROWS:
                self._add_row(event)
            elif kind in RETURNS:
                self._return_to(event["step"])
        self.events.append(event)

    def _add_row(self, row: Event) -> None:
        step = row["step"]
        for name, value in row["metrics"].items():
            points = self.curves.setdefault(name, [])
            if points and (points[-1][0] == step or _is_close(points)):
                points.pop()
            points.append((step, float(value)))
            if len(points) > MOST_POINTS:
                del points[1:-1:2]
        if row["event"] == "log" and is_number(row.get("elapsed")):
            self._timed = [*self._timed[1 - _RATE_ROWS :], (step, float(row["elapsed"]))]

    def _return_to(self, step: int) -> None:
        """Forget what is trained again."""
        self._timed = []
        for name, points in self.curves.items():
            self.curves[name] = [point for point in points if point[0] <= step]

    # -- what is shown

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics: the loss first."""
        return sorted((name for name, points in self.curves.items() if points), key=metric_order)

    @property
    def step(self) -> int:
        """Updates done in the last call of `fit`."""
        return self.progress[1]

    @property
    def steps(self) -> int | None:
        """Updates that there will be in all; None if unknown, as after a rollback where the length
        of an epoch is."""
        last = self.starts[-1] if self.starts else {}
        epochs, length, undone = last.get("epochs"), last.get("steps_per_epoch"), 0.0
        if is_number(length):
            undone = self._undone(length)
        elif not self._has_rolled_back:  # else steps come again
            rows = (row for row in self.rows if place(row) == self.last_fit)
            ends = [row for row in rows if row["event"] == "epoch" and row["epoch"] > 0]
            length = ends[-1]["step"] / ends[-1]["epoch"] if ends else None
        whole = epochs * length - undone if is_number(epochs) and length else None
        limit = last.get("settings", {}).get("trainer")
        most = limit.get("max_steps") if isinstance(limit, dict) else None
        known = [each for each in (whole, most) if is_number(each) and each]
        return round(min(known)) if known else None

    @property
    def _has_rolled_back(self) -> bool:
        """Whether the last call of `fit` has, since it began at its first step."""
        for event in reversed(self.outer):
            if place(event) == self.last_fit:
                if event["event"] == "rollback":
                    return True
                if event["event"] == "start" and not event["step"]:
                    return False
        return False

    def _undone(self, length: Any) -> float:
        """Updates that rollbacks have undone: the epochs so far have more than count.

        Args:
            length: updates of an epoch.
        """
        back = next((event for event in reversed(self.outer) if event["event"] in RETURNS), {})
        if not is_number(back.get("batch")):  # an older record
            return 0.0
        return float(back["epoch"] * length + back["batch"] - back["step"])

    @property
    def steps_per_second(self) -> float | None:
        """Of the newest rows."""
        if len(self._timed) < 2:
            return None
        (step, begin), (last, end) = self._timed[0], self._timed[-1]
        return (last - step) / (end - begin) if end > begin and last > step else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds of training left; None if unknown."""
        steps, speed = self.steps, self.steps_per_second
        return max(steps - self.step, 0) / speed if steps and speed else None

    @property
    def restart_seconds(self) -> float | None:
        """Seconds after its failure at which the run is started again; None: it is not."""
        if self.end is None or self.end["reason"] != "failed":
            return None
        seconds: Any = self.end.get("restart")
        return float(seconds) if is_number(seconds) else None


def _is_close(points: Sequence[Point]) -> bool:
    """Whether the newest of many points is nearer to the one before than the others are: the next
    one replaces it. Else the thinned curve would hold little but the newest steps."""
    if len(points) <= MOST_POINTS // 2:
        return False
    first, before, newest = points[0][0], points[-2][0], points[-1][0]
    return (newest - before) * MOST_POINTS < 2 * (newest - first)
