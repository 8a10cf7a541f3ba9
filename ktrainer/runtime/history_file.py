"""The record of a run: `history.jsonl` in its folder, one JSON event a line, only appended to.

| `event` | says |
|---|---|
| `start` | training begins, or continues after `step`: settings, versions, code, model, data |
| `data` | facts that the first update shows: digests of the first batch |
| `metrics` | whether a lower (`min`) or a higher (`max`) value is better, by name |
| `log`, `validation`, `epoch` | rows: the metrics of a step, exact; `epoch` counts from 1 |
| `times` | what each rank's time went to since the last one: `ranks`, a dict of seconds each |
| `slow` | something that slows training: `rank`, `cause`, `message` |
| `warning` | one of Python's, or a log record: `ranks` that had it, `kind`, `message`, `where` |
| `checkpoint` | one is on the disk |
| `rollback` | training has returned to `step` |
| `ranks` | ranks were lost or have joined; the present ones continue after `step` |
| `end` | `reason`: finished, interrupted or failed, and why |

Every event has `fit`, the number of the script's call of `fit`; `inside`, the number of a call that
a callback has made in it; and `time`, in seconds since 1970. In `start`, `rollback` and `ranks`,
`epoch` counts the finished epochs, and `batch` the updates of the present one. Rows after the
`step` of one of these were trained again, as were epochs after its `epoch`: `current_rows` leaves
them out. An epoch that had ended before a rollback keeps its row, at the step at which it ended.

Imports only the standard library.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

NAME = "history.jsonl"
MEASURED = ("speed/", "memory/")  # names of values that differ between equal runs begin so
ROWS = ("log", "validation", "epoch")
RETURNS = ("start", "rollback", "ranks")  # after these, rows of later steps no longer count
_LARGEST = 2**63  # of whole numbers
_POSITION = {"step": int, "epoch": int}
_NEEDED: dict[str, dict[str, Any]] = {  # the fields of an event without which it says nothing
    "start": {**_POSITION, "time": (int, float)},
    "data": {"data": dict},
    "metrics": {"better": dict},
    **{row: {**_POSITION, "metrics": dict} for row in ROWS},
    "times": {**_POSITION, "ranks": list},
    "slow": {"step": int, "cause": str, "message": str},
    "warning": {"step": int, "ranks": list, "kind": str, "message": str},
    "rollback": _POSITION,
    "ranks": _POSITION,
    "checkpoint": {"step": int, "path": str},
    "end": {"reason": str},
}

Event = dict[str, Any]

_writing = threading.Lock()  # else a line of another thread looks incomplete while it is written


def append(path: Path, event: str, /, **fields: Any) -> None:
    """Append an event; a line that a killed process has left incomplete is ended first.

    One system call writes it, so lines of several threads and processes do not mix.

    Raises:
        OSError: it could not be written, or not all of it.
    """
    fields = {"event": event, **fields, "time": round(time.time(), 3)}
    line = _encode(fields) + b"\n"
    with _writing:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(file)


def read_events(path: Path, only_last: Collection[str] = ()) -> Iterator[Event]:
    """The complete events, in the order of writing.

    Args:
        only_last: kinds of event of which, of several in a row, the last alone is read: a long run
            has millions of lines, most of them of one kind.
    """
    skipped = tuple(b'{"event": "%s"' % kind.encode() for kind in only_last)
    held = b""
    with path.open("rb") as file:
        for line in file:
            if skipped and line.startswith(skipped):
                held = line if line.endswith(b"\n") else held
                continue
            if held and (event := decode(held)) is not None:
                yield event
            held = b""
            if (event := decode(line)) is not None:
                yield event
    if held and (event := decode(held)) is not None:
        yield event


def read_new(path: Path, offset: int) -> tuple[list[tuple[int, Event]], int]:
    """The complete events after the first `offset` bytes, each with the place of its line, and the
    offset to continue from."""
    found = []
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            if (event := decode(line)) is not None:
                found.append((offset, event))
            offset += len(line)
    return found, offset


def current_rows(events: Iterable[Event]) -> list[Event]:
    """The rows of all steps that count, each once: not those that were trained again later."""
    rows: list[Event] = []
    for event in events:
        if event["event"] in ROWS:
            rows.append(event)
        elif event["event"] in RETURNS:
            rows = [row for row in rows if counts_after(row, event)]
    return rows


def end_since(events: Sequence[Event]) -> Event | None:
    """How training has ended since it last began or continued; None: it has not, or was killed.

    A checkpoint that was being written, or a warning, may come after it.
    """
    for event in reversed(events):
        if event["event"] == "end":
            return event
        if event["event"] in RETURNS:
            return None
    return None


def place(event: Event) -> tuple[int, int]:
    """The call of `fit` that an event is of: its number, and that of one inside it, else 0."""
    return int(event.get("fit", 1)), int(event.get("inside", 0))


def counts_after(row: Event, back: Event) -> bool:
    """Whether a row still counts after training has returned to the place of `back`."""
    if place(row) != place(back):
        fit, inside = place(back)
        # A script that starts afresh comes to its later fits again.
        fresh = back["event"] == "start" and not back["step"] and not inside
        return not (fresh and place(row)[0] >= fit)
    if row["event"] == "epoch":  # an incomplete one is trained again
        return bool(row["epoch"] <= back["epoch"])
    return bool(row["step"] <= back["step"])


def _encode(event: Event) -> bytes:
    try:
        return json.dumps(event, allow_nan=False, default=str).encode()
    except ValueError:  # JSON has no NaN; `float` reads these words
        return json.dumps(spelled(event), default=str).encode()


def spelled(value: Any) -> Any:
    """A copy of a nested structure in which NaN and infinities are strings, as JSON has neither."""
    if isinstance(value, dict):
        return {key: spelled(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(line: bytes) -> Event | None:
    """The event of a line; None for what a killed process, another program or a newer version of
    this one has left."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_valid(event) else None


def _is_valid(event: Event) -> bool:
    """Whether an event is of a known kind, and has the fields that its readers rely on."""
    kind = event.get("event")
    if not isinstance(kind, str) or kind not in _NEEDED:
        return False
    if not all(isinstance(event.get(name), types) for name, types in _NEEDED[kind].items()):
        return False
    if not all(_is_count(event.get(name, 0)) for name in ("fit", "inside", "step", "epoch")):
        return False
    if not isinstance(event.get("settings", {}), dict):
        return False
    return kind not in ROWS or all(_is_number(value) for value in event["metrics"].values())


def _is_count(value: Any) -> bool:
    """Whether a value is a number of steps, epochs or calls, and can be calculated with."""
    return isinstance(value, int) and abs(value) <= _LARGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= _LARGEST  # a larger one is no float
    return isinstance(value, float) or value in ("nan", "inf", "-inf")
