"""Plans on a screen or in a file: tables, sizes, schedules as text, SVG and PNG.

A picture of a schedule has a row for each rank, a block for each action, and time to the right.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktrainer.backends.pipeline.schedules.actions import Schedule
from ktrainer.backends.pipeline.schedules.schedule_text import schedule_text
from ktrainer.backends.pipeline.schedules.timeline import Span, Timeline

_COLORS = {"F": "#4c78a8", "B": "#e45756", "I": "#f58518", "W": "#72b7b2"}
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_WIDTH, _ROW, _LEFT, _TOP = 1100.0, 34.0, 70.0, 40.0


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
    return schedule_text(schedule, columns=max(4, (width - head - 2) // cell))


def draw(timeline: Timeline, path: Path) -> None:
    """Write the picture, `.svg` or `.png`; the latter needs matplotlib."""
    if path.suffix == ".png":
        _draw_png(timeline, path)
    else:
        path.write_text(svg(timeline), encoding="utf-8")


def svg(timeline: Timeline) -> str:
    """The picture as text of an SVG file; each block has its exact times as a tooltip."""
    schedule = timeline.schedule
    scale = _WIDTH / (timeline.makespan or 1.0)
    height = _TOP + _ROW * schedule.ranks + 20
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT:g}" y="24">{_title(timeline)}</text>',
        *_legend(timeline),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + _ROW * rank
        elements.append(f'<text x="10" y="{y + 21:g}">rank {rank}</text>')
        elements += [_block(timeline, span, scale, y) for span in spans]
    return "\n".join([*elements, "</svg>"]) + "\n"


def _block(timeline: Timeline, span: Span, scale: float, y: float) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    label = timeline.schedule.label(span.action)
    text = (
        f'<text x="{x + width / 2:.2f}" y="{y + 21:g}" text-anchor="middle" fill="white">'
        f"{label}</text>"
        if width > 8 * len(label)
        else ""
    )
    return (
        f'<g><title>{span.action}: {span.start:.4g} to {span.end:.4g}</title><rect x="{x:.2f}" '
        f'y="{y + 2:g}" width="{width:.2f}" height="{_ROW - 4:g}" stroke="white" '
        f'fill="{_COLORS[span.action.kind]}"/>{text}</g>'
    )


def _legend(timeline: Timeline) -> list[str]:
    kinds = [kind for kind in _COLORS if kind in _kinds(timeline)]
    elements = []
    for place, kind in enumerate(kinds):
        x = _LEFT + _WIDTH - 140 * (len(kinds) - place)
        elements.append(f'<rect x="{x:g}" y="13" width="14" height="14" fill="{_COLORS[kind]}"/>')
        elements.append(f'<text x="{x + 20:g}" y="24">{_MEANING[kind]}</text>')
    return elements


def _kinds(timeline: Timeline) -> set[str]:
    return {span.action.kind for spans in timeline.spans for span in spans}


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, bubble "
        f"{100 * timeline.bubble:.1f}%"
    )


def _draw_png(timeline: Timeline, path: Path) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    ranks = timeline.schedule.ranks
    figure: Any = Figure(figsize=(12, 1 + 0.4 * ranks), dpi=120)
    axes = figure.subplots()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            length, color = span.end - span.start, _COLORS[span.action.kind]
            axes.barh(rank, length, left=span.start, color=color, edgecolor="white")
            middle = (span.start + span.end) / 2
            name = timeline.schedule.label(span.action)
            axes.text(middle, rank, name, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_title(_title(timeline))
    figure.savefig(path, bbox_inches="tight")
