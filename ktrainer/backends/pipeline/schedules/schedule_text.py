"""A schedule as text: a row for each rank, a column for each tick of time."""

from __future__ import annotations

from ktrainer.backends.pipeline.schedules.actions import Schedule, live_activations
from ktrainer.backends.pipeline.schedules.timeline import Costs, Timeline, make_timeline

_IDLE, _BUSY, _ELLIPSIS = ".", "-", "…"


def schedule_text(
    schedule: Schedule, costs: Costs | None = None, columns: int | None = None
) -> str:
    """Draw a schedule as a rank x time grid, and below it the bubble.

        rank 0  F0 F1 .  .  B0 -- .  B1 --
        rank 1  .  F0 B0 -- F1 B1 -- .  .
        bubble 33.3%, 9 ticks, live activations 2 1

    `F0` starts the forward pass of microbatch 0, `-` continues it, `.` is idle. With several
    chunks a rank, `2F0` is that of stage 2. `live activations` is the most that each rank keeps.

    Args:
        schedule: what to print.
        costs: in whole ticks; by default 1 for F, 2 for B, 1 for I and W, 0 for transfers.
        columns: print no more columns than this, the first and the last ones.

    Raises:
        ScheduleError: the schedule deadlocks.
        ValueError: `costs` give times that are not whole numbers.
    """
    timeline = make_timeline(schedule, costs)
    cells = _cells(timeline)
    count = len(cells[0])
    width = max(len(cell) for row in cells for cell in row)
    lines = []
    for rank, row in enumerate(cells):
        text = [(_BUSY * width if cell == _BUSY else cell).ljust(width) for cell in row]
        if columns is not None and count > columns:
            half = max(columns // 2, 1)
            text = [*text[: columns - half], _ELLIPSIS, *text[count - half :]]
        name = f"rank {rank}".ljust(len(f"rank {schedule.ranks - 1}"))
        lines.append(f"{name}  {' '.join(text)}".rstrip())
    lines.append(f"bubble {100 * timeline.bubble:.1f}%, {count} ticks{_live(schedule)}")
    return "\n".join(lines)


def _live(schedule: Schedule) -> str:
    if not schedule.trains:
        return ""
    return f", live activations {' '.join(map(str, live_activations(schedule)))}"


def _cells(timeline: Timeline) -> list[list[str]]:
    """Text of each tick, for each rank."""
    count = _whole(timeline.makespan)
    rows = []
    for spans in timeline.spans:
        row = [_IDLE] * count
        for span in spans:
            start, end = _whole(span.start), _whole(span.end)
            row[start:end] = [_BUSY] * (end - start)
            if end > start:
                row[start] = timeline.schedule.label(span.action)
        rows.append(row)
    return rows


def _whole(time: float) -> int:
    if time != int(time):
        raise ValueError(
            f"a grid has whole ticks, and something happens at {time:g}: scale and round the "
            "costs first"
        )
    return int(time)
