"""The view of a run in `ktrainer watch`, drawn with rich."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ktrainer.runs.live_record import LiveRecord, Point
from ktrainer.runs.run_curves import is_number
from ktrainer.runs.run_marks import Mark, run_marks
from ktrainer.runs.run_record import span

METRICS = 8  # that are shown
EVENTS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "running": "bold cyan",
    "finished": "bold green",
    "interrupted": "bold yellow",
    "failed": "bold red",
}
_MARKED = {"ranks": "red", "failed": "red", "interrupted": "yellow", "rollback": "yellow"}
_MARKED |= {"slow": "yellow", "warning": "yellow", "finished": "green"}


def live_view(record: LiveRecord, width: int, note: str = "") -> Any:
    """All that is shown.

    Args:
        width: of the terminal.
        note: what the command is waiting for, if anything.
    """
    sections = [_head(record), _progress(record, width)]
    if record.metrics:
        sections += [Text(), _metrics(record, width)]
    if marks := _newest(run_marks(record)):
        sections += [Text(), _events(marks)]
    if record.state[0] in ("interrupted", "failed") and record.resume:
        sections += [Text(), Text(printable(f"resume: {record.resume}"))]
    if note:
        sections += [Text(), Text(note, style="yellow")]
    return Group(*sections)


def _head(record: LiveRecord) -> Text:
    state, why = record.state
    last = record.starts[-1] if record.starts else {}
    head = Text()
    head.append(printable(str(record.folder)), style="bold")
    head.append("  ")
    head.append(printable(state), style=_STYLES.get(state, ""))
    head.append(printable(f": {why}" if why else ""))
    ranks, host = last.get("ranks"), last.get("host")
    if is_number(ranks):
        ranks = _ranks_now(record, ranks)
        head.append(f"\n{ranks} process{'' if ranks == 1 else 'es'}", style="dim")
        head.append(printable(f" on {host}" if host else ""), style="dim")
        silent = span(max(0.0, time.time() - record.last_sign))
        head.append(f", last sign of life {silent} ago", style="dim")
    return head


def _ranks_now(record: LiveRecord, ranks: Any) -> Any:
    """The number of ranks after the last change of them."""
    for event in reversed(record.outer):
        if event["event"] == "start":
            break
        if event["event"] == "ranks" and is_number(event.get("ranks")):
            return event["ranks"]
    return ranks


def _progress(record: LiveRecord, width: int) -> Any:
    epoch, step = record.progress
    last = record.starts[-1] if record.starts else {}
    running, epochs = record.state[0] == "running", last.get("epochs")
    whole: Any = epochs if is_number(epochs) else None
    of = "" if whole is None else f"/{whole}"
    current = epoch + 1 if running and (whole is None or epoch < whole) else epoch
    steps, speed, left = record.steps, record.steps_per_second, record.seconds_left
    row = Table.grid(padding=(0, 2))
    for _ in range(5):
        row.add_column(no_wrap=True)
    row.add_row(
        Text(f"epoch {current}{of}", style="bold"),
        ProgressBar(total=steps or 1, completed=step if steps else 0, width=max(10, width // 4)),
        Text(f"step {step}/{steps}" if steps else f"step {step}"),
        Text(f"{speed:.3g} steps/s" if speed else "", style="cyan"),
        Text(f"ETA {span(left)}" if left is not None and running else "", style="green"),
    )
    return row


def _metrics(record: LiveRecord, width: int) -> Table:
    shown = record.metrics[:METRICS]
    names = max([len(name) for name in shown] + [6])
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_row(*(Text(name, style="dim") for name in ("", "now", "best", "course")))
    for name in shown:
        points = record.curves[name]
        best = record.best.get(name)
        table.add_row(
            Text(printable(name), style="bold"),
            Text(f"{points[-1][1]:.4g}"),
            Text("" if best is None else f"{best.value:.4g}"),
            Text(sparkline(points, max(10, min(60, width - names - 26))), style="cyan"),
        )
    if len(record.metrics) > METRICS:
        table.add_row(Text(f"and {len(record.metrics) - METRICS} more", style="dim"))
    return table


def _newest(marks: Sequence[Mark]) -> list[Mark]:
    """The last things that happened; warnings are at most half of them."""
    warned = [mark for mark in marks if mark.kind == "warning"][-EVENTS // 2 :]
    return [mark for mark in marks if mark.kind != "warning" or mark in warned][-EVENTS:]


def _events(marks: Sequence[Mark]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for mark in marks:
        ago = "" if mark.time is None else f"{span(max(0.0, time.time() - mark.time))} ago"
        table.add_row(
            Text(ago, style="dim"), Text(printable(mark.text), style=_MARKED.get(mark.kind, ""))
        )
    return table


def printable(text: str) -> str:
    """A text of the record that cannot change the terminal's state."""
    return "".join(character if character.isprintable() else "?" for character in text)


def sparkline(points: Sequence[Point], width: int) -> str:
    """A line of blocks: means of equal parts of the steps, `!` where one is no finite number.

    By steps, not by points: a long run's curve holds more points of the newest steps.
    """
    points = sorted(points, key=lambda point: point[0])  # a foreign record's may be in any order
    count = min(width, len(points))
    begin, end = (points[0][0], points[-1][0]) if points else (0, 0)
    bins: list[list[float]] = [[] for _ in range(count)]
    for step, value in points:
        bins[min((step - begin) * count // max(end - begin, 1), count - 1)].append(value)
    means: list[float] = []
    for part in bins:  # one without points is as the one before
        means.append(sum(part) / len(part) if part else means[-1])
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
