"""A schedule as a picture: a row for each rank, a block for each action, time to the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktrainer.backends.pipeline.simulate import Span, Timeline

_COLORS = {"F": "#4c78a8", "B": "#e45756", "I": "#f58518", "W": "#72b7b2"}
_MEANING = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_WIDTH, _ROW, _LEFT, _TOP = 1100.0, 34.0, 70.0, 40.0


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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT:g}" y="24">{_title(timeline)}</text>',
        *_legend(timeline),
    ]
    for rank, spans in enumerate(timeline.spans):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="10" y="{y + 21:g}">rank {rank}</text>')
        parts += [_block(timeline, span, scale, y) for span in spans]
    return "\n".join([*parts, "</svg>"]) + "\n"


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
    parts = []
    for place, kind in enumerate(kinds):
        x = _LEFT + _WIDTH - 140 * (len(kinds) - place)
        parts.append(f'<rect x="{x:g}" y="13" width="14" height="14" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 20:g}" y="24">{_MEANING[kind]}</text>')
    return parts


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
