"""Tables, sizes and grids that fit a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from ktrainer.backends.pipeline.grid import grid
from ktrainer.backends.pipeline.schedule import Schedule


def table(rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, two spaces between."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def bytes_text(count: float) -> str:
    """`1.5 MB`, in powers of 1000."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def grid_text(schedule: Schedule, width: int | None = None) -> str:
    """The schedule as a grid of equal stages, its middle left out where it is too wide.

    Args:
        width: characters; None: the terminal's.
    """
    width = width or max(60, shutil.get_terminal_size((100, 24)).columns)
    last = f"{schedule.stages - 1}F" if schedule.chunks > 1 else "F"
    cell = len(f"{last}{schedule.microbatches - 1}") + 1
    head = len(f"rank {schedule.ranks - 1}  ")
    return grid(schedule, columns=max(4, (width - head - 2) // cell))
