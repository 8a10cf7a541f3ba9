"""A picture of the main curves of runs, for a README; needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktrainer.runs.report_data import page_data
from ktrainer.runs.run_record import RunRecord

_PANELS = 2  # metrics that are drawn
_COLORS = ("#0072b2", "#d55e00", "#00875f", "#b5568f", "#a87400", "#5b6b7b")  # as in report.css
_MARKED = {"ranks": "#b3261e", "failed": "#b3261e", "interrupted": "#8a5300", "rollback": "#8a5300"}


def draw_picture(records: Sequence[RunRecord], path: Path) -> None:
    """Draw the loss and one more metric by epochs, in the last call of `fit` of all runs.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    data = page_data(records)
    nothing: dict[str, Any] = {"curves": [], "marks": []}
    runs = [(run["name"], run["fits"].get(data["fit"], nothing)) for run in data["runs"]]
    metrics = _main_metrics([curve for _, fit in runs for curve in fit["curves"]])
    figure: Any = Figure(figsize=(4.8 * max(len(metrics), 1), 3.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, metric in zip(
        figure.subplots(1, len(metrics) or 1, squeeze=False)[0], metrics, strict=False
    ):
        _draw_metric(axes, metric, runs)
    buffer = io.BytesIO()  # a file is not left half-written
    figure.savefig(buffer, format="png")
    path.write_bytes(buffer.getvalue())


def _main_metrics(curves: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics with values of validation, or else of training: the loss first."""
    validated = {curve["metric"] for curve in curves if curve["validation"]}
    names = list(dict.fromkeys(curve["metric"] for curve in curves))
    chosen = [name for name in names if name in validated] or names
    return chosen[:_PANELS]


def _draw_metric(axes: Any, metric: str, runs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    several = len(runs) > 1
    for number, (name, fit) in enumerate(runs):
        for curve in fit["curves"]:
            if curve["metric"] != metric:
                continue
            part = "validation" if curve["validation"] else "training"
            color = _COLORS[(number if several else int(curve["validation"])) % len(_COLORS)]
            values = [_drawable(float(value)) for value in curve["value"]]  # nan and inf are words
            label = _plain(f"{name}: {part}") if several else part
            style = "--" if curve["validation"] else "-"
            axes.plot(curve["epoch"], values, style, color=color, label=label, linewidth=1.5)
        for mark in fit["marks"]:
            if mark["kind"] in _MARKED and mark["epoch"] is not None:
                axes.axvline(mark["epoch"], color=_MARKED[mark["kind"]], linestyle=":", linewidth=1)
    axes.set(title=_plain(metric), xlabel="epochs")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _drawable(value: float) -> float:
    """A value, or nan for one whose distance to others may be infinite."""
    return value if abs(value) < 1e300 else math.nan


def _plain(text: str) -> str:
    """A text that can be drawn, and is not read as a formula."""
    return text.encode(errors="replace").decode().replace("$", r"\$")
