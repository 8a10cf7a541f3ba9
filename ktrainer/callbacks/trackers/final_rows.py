"""The rows of one `fit` that are final, read from `history.jsonl` as it grows.

A row is final once a checkpoint of a later step is on the disk, or the run has finished: training
resumes from there, and does not repeat the step. All rows of a step (of logs, of validation, of the
epoch) are final together, so a step is complete when it is sent.

Trackers take steps in order only: of an epoch that had ended beyond the step that a rollback
returns to they do not get the row, which the files keep.

A finished run that is extended trains again what followed its last checkpoint, and was sent: it
gives the same rows, or what was sent is not what happened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktrainer.callbacks.trackers.tracker_run import Point
from ktrainer.runtime.history_file import (
    MEASURED,
    RETURNS,
    ROWS,
    Event,
    counts_after,
    place,
    read_new,
)


class FinalRows:
    """Rows that are to be sent to a tracker.

    Args:
        path: `history.jsonl`.
        fit: which call of `fit`: its number, and that of one inside it, else 0.
        live: the run has no checkpoints: a row is final when the next step is there.
        sent: the last step that may have been sent; -1: none.
        offset: bytes of the file that were read by then.

    Attributes:
        start: the last event `start`; None before it.
        sent: the last step that was sent.
        returned: training has returned to before `sent`, and is not known to repeat it: what was
            sent is not what happened.
        offset: bytes read so far.
    """

    def __init__(
        self, path: Path, fit: tuple[int, int], live: bool, sent: int = -1, offset: int = 0
    ) -> None:
        self.path, self.fit, self.live, self.sent = path, fit, live, sent
        self.start: Event | None = None
        self.returned = False
        self.offset = 0
        self._known = offset
        self._rows: list[Event] = []
        self._final = -1
        self._finished = False
        # Rows that an extension of a finished run trains again, by kind and step; after which one.
        self._ending: dict[tuple[str, int], Event] = {}
        self._ending_after = 0

    def read(self) -> None:
        """Read what was appended. Raises OSError."""
        if not self.path.exists():
            return
        events, self.offset = read_new(self.path, self.offset)
        for at, event in events:
            self._take(at, event)

    def _take(self, at: int, event: Event) -> None:
        kind, ours = event["event"], place(event) == self.fit
        if kind in ROWS and ours:
            before = self._ending.get((kind, event["step"]))
            if before is not None and at >= self._known and self.sent >= 0:
                self.returned = self.returned or _values(event) != _values(before)
            self._rows.append(event)
        elif kind in RETURNS:
            self._return_to(event, known=at < self._known)
        elif kind == "checkpoint" and ours:
            self._final = max(self._final, event["step"])
        elif kind == "end" and ours:
            self._finished = event["reason"] == "finished"
            self._ending, self._ending_after = {}, self._final
            if self._finished and self._final > 0:
                rows = [row for row in self._rows if row["step"] > self._final]
                self._ending = {(row["event"], row["step"]): row for row in rows}
        if kind == "start" and ours:
            self.start, self._final, self._finished = event, event["step"], False

    def _return_to(self, event: Event, known: bool) -> None:
        """Drop the rows that will be trained again."""
        fit, inside = self.fit
        last = {"event": "log", "step": self.sent, "epoch": 0, "fit": fit, "inside": inside}
        if not known and self.sent >= 0 and not counts_after(last, event):
            self.returned = self.returned or not self._repeats(event)
        self._rows = [row for row in self._rows if counts_after(row, event)]
        if place(event) == self.fit:
            self._final = min(self._final, event["step"])
            # An epoch that has ended stands; its step comes again, with the rows of other epochs.
            self._rows = [row for row in self._rows if row["step"] <= event["step"]]

    def _repeats(self, event: Event) -> bool:
        """Whether training repeats the ending of a finished run, after which nothing was sent."""
        if not self._ending or place(event) != self.fit:
            return False
        last = max(step for _, step in self._ending)
        return bool(event["step"] >= self._ending_after and self.sent <= last)

    def points(self) -> list[Point]:
        """The final rows after `sent`, those of a step together."""
        limit = self._final
        if self.live and self._rows:
            limit = self._rows[-1]["step"]
        found: dict[int, dict[str, Any]] = {}
        times: dict[int, float] = {}
        for row in self._rows:
            step = row["step"]
            if step >= limit and not self._finished:
                break  # rows are in order, and many may wait for a checkpoint
            if step > self.sent:
                found.setdefault(step, {}).update(_named(row))
                times[step] = row["time"]
        return [Point(step, times[step], values) for step, values in found.items()]

    def mark_sent(self, step: int) -> None:
        """Forget rows up to `step`."""
        self.sent = step
        self._rows = [row for row in self._rows if row["step"] > step]

    @property
    def waiting(self) -> int:
        """Steps with rows that were not sent."""
        return len({row["step"] for row in self._rows if row["step"] > self.sent})


def _values(row: Event) -> dict[str, Any]:
    """The values of a row that are the same when it is trained again."""
    return {k: v for k, v in row["metrics"].items() if not k.startswith(MEASURED)}


def _named(row: Event) -> dict[str, float]:
    """Values of a row by the names that trackers get."""
    part = {"log": "train", "validation": "validation", "epoch": "epoch"}[row["event"]]
    found = {}
    for name, value in row["metrics"].items():
        of_validation = part != "train" and name.startswith("val_")
        home = "validation" if of_validation else part
        found[f"{home}/{name.removeprefix('val_') if of_validation else name}"] = float(value)
    return found
