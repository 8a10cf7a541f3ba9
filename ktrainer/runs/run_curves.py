"""Curves of a run: its rows by metric, thinned out to what a screen can show."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktrainer.runtime.history_file import ROWS, Event

PARTS = 500  # of a thinned curve: about the pixels of a picture's width
MOST_POINTS = 4 * PARTS  # a part keeps its first and last, lowest and highest point

Point = tuple[int, float]  # number of the row, value


@dataclass
class Curve:
    """The values of one metric.

    Attributes:
        metric: its name; of validation, without `val_`.
        validation: whether these are values of validation.
        rows: how many there are.
        points: those that are drawn: all, or of each part the first, last, lowest and highest, and
            the first that is no finite number.
        means: a mean for each part, in its middle; None where `points` are all.
    """

    metric: str
    validation: bool
    rows: int
    points: list[Point]
    means: list[Point] | None = None


@dataclass
class RowAxes:
    """The place of each row on the axes.

    Attributes:
        steps: updates done.
        epochs: passes over the data done, with the part of the present one.
        seconds: of training; None where it is not recorded.
    """

    steps: list[int] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)

    def at(self, step: int) -> tuple[float, float | None] | None:
        """(epochs, seconds) after an update, by the rows around it; None without rows."""
        if not self.steps:
            return None
        right = min(bisect_left(self.steps, step), len(self.steps) - 1)
        left = max(right - 1, 0)
        low, high = self.steps[left], self.steps[right]
        share = (step - low) / (high - low) if high > low else 1.0
        share = min(max(share, 0.0), 1.0)
        seconds = self.seconds[left], self.seconds[right]
        between = None
        if seconds[0] is not None and seconds[1] is not None:
            between = seconds[0] + share * (seconds[1] - seconds[0])
        return self.epochs[left] + share * (self.epochs[right] - self.epochs[left]), between


def row_axes(events: Sequence[Event], steps_per_epoch: Any = None) -> RowAxes:
    """The axes of the rows of one `fit`.

    Args:
        events: the rows that count, and between them where training has begun or returned.
        steps_per_epoch: updates of an epoch, if known.
    """
    rows = [event for event in events if event["event"] in ROWS]
    ends = {0: 0} | {row["epoch"]: row["step"] for row in rows if row["event"] == "epoch"}
    known = steps_per_epoch if is_number(steps_per_epoch) else 0
    first, begun = _first_steps(events, ends, known)
    longest: dict[int, int] = {}  # updates of an epoch that has not ended
    for row in rows:
        if (epoch := row["epoch"]) not in ends:
            longest[epoch] = max(longest.get(epoch, 1), row["step"] - begun[epoch])
    axes = RowAxes()
    for row, begin in zip(rows, first, strict=True):
        epoch, step, elapsed = row["epoch"], row["step"], row.get("elapsed")
        length = (ends[epoch] - begun[epoch]) if epoch in ends else max(known, longest[epoch])
        done = (step - begin) / length if row["event"] != "epoch" and length > 0 else 1.0
        axes.steps.append(step)
        axes.epochs.append(epoch - 1 + min(max(done, 0.0), 1.0))
        axes.seconds.append(elapsed if is_number(elapsed) else None)
    return axes


def _first_steps(
    events: Sequence[Event], ends: dict[int, int], known: Any
) -> tuple[list[int], dict[int, int]]:
    """Updates done when the epoch of each row began, and when each epoch began, by the last of its
    rows: a rollback in an epoch undoes updates, not batches, as if it had begun earlier. Estimated
    for one that began in another run's record.

    Args:
        ends: updates done at the ends of epochs.
        known: updates of an epoch; 0 if unknown.
    """
    of_rows, found = list[int](), dict[int, int]()
    for event in events:
        epoch, step = event["epoch"], event["step"]
        if event["event"] not in ROWS:
            if is_number(event.get("batch")):  # older records have none
                found[epoch + 1] = step - event["batch"]
            continue
        if epoch not in found and epoch - 1 in ends:
            found[epoch] = ends[epoch - 1]
        elif epoch not in found and known and epoch in ends:
            found[epoch] = max(ends[epoch] - known, 0)
        elif epoch not in found:
            found[epoch] = min(known * (epoch - 1) if known else step, step - 1)
        of_rows.append(found[epoch])
    return of_rows, found


def run_curves(rows: Iterable[Event]) -> list[Curve]:
    """A curve for each metric, and one for its values of validation: the loss first.

    Of an epoch's end and a logged row at the same step the former counts.
    """
    found: dict[str, list[Point]] = {}
    steps: dict[str, int] = {}
    for number, row in enumerate(rows):
        for name, text in row["metrics"].items():
            points = found.setdefault(name, [])
            if steps.get(name) == row["step"]:
                points.pop()
            steps[name] = row["step"]
            points.append((number, float(text)))
    return [_curve(name, found[name]) for name in sorted(found, key=metric_order)]


def metric_order(name: str) -> tuple[bool, str, bool]:
    """Sorts names: the loss first, a metric of validation after that of training."""
    metric = name.removeprefix("val_")
    return metric != "loss", metric, metric != name


def _curve(name: str, points: list[Point]) -> Curve:
    metric = name.removeprefix("val_")
    curve = Curve(metric, metric != name, len(points), points)
    if len(points) > MOST_POINTS:
        bounds = [len(points) * k // PARTS for k in range(PARTS + 1)]
        parts = [points[low:high] for low, high in itertools.pairwise(bounds)]
        curve.points = [point for part in parts for point in _kept(part)]
        curve.means = [_mean(part) for part in parts]
    return curve


def _kept(part: Sequence[Point]) -> list[Point]:
    kept = {part[0], part[-1]}
    finite = [point for point in part if math.isfinite(point[1])]
    if finite:
        kept |= {min(finite, key=_value), max(finite, key=_value)}
    if len(finite) < len(part):
        kept.add(next(point for point in part if not math.isfinite(point[1])))
    return sorted(kept)


def _mean(part: Sequence[Point]) -> Point:
    finite = [value for _, value in part if math.isfinite(value)]
    mean = sum(finite) / len(finite) if finite else math.nan
    return part[len(part) // 2][0], mean


def _value(point: Point) -> float:
    return point[1]


def is_number(value: Any) -> bool:
    """Whether a field of an event is a finite number that can be calculated with."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number that is no float
        return False
