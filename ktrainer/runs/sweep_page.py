"""The page of `ktrainer sweep`: its trials as parallel coordinates, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ktrainer.runs.html_page import html_page
from ktrainer.runs.report_tables import Cell, number_text, table
from ktrainer.tuning.search_space import Space, Value

_BODY = """<section id="coordinates" hidden><h2>Trials</h2>
<p class="quiet">A line is a trial, from the best (blue, bold) to the worst (orange); dotted without
a value. Drag along an axis to see only the trials in a range.</p>
<div id="parallel" class="scroll"></div></section>
<noscript><p>The picture needs JavaScript, which is off. The trials are below.</p></noscript>
<section><h2>Best</h2>{best}</section>
<section><h2>All trials</h2>{trials}</section>
<section><h2>The sweep</h2>{facts}</section>"""
_LOG = 50.0  # a metric that spans so much is drawn on a logarithmic axis


@dataclass(frozen=True)
class TrialRow:
    """A trial as it is shown.

    Attributes:
        number: from 0.
        state: finished, pruned, failed or not finished.
        value: of the metric, as far as it is known.
        values: of the keys.
        epochs: that it has trained.
        why: it has failed or was pruned.
    """

    number: int
    state: str
    value: float | None
    values: Mapping[str, Value]
    epochs: int | None = None
    why: str = ""

    def cells(self, keys: Sequence[str]) -> list[str]:
        """The texts of a row of a table; `row_head` names them."""
        value = "" if self.value is None else number_text(self.value)
        epochs = "" if self.epochs is None else str(self.epochs)
        tried = [value_text(self.values[key]) for key in keys]
        return [str(self.number), self.state, value, epochs, *tried]


def row_head(metric: str, keys: Sequence[str]) -> list[str]:
    """The names of the columns of `TrialRow.cells`."""
    return ["trial", "state", metric, "epochs", *keys]


def value_text(value: Value) -> str:
    """A value of a key, a real number shortened."""
    return number_text(value) if isinstance(value, float) else str(value)


def sweep_page(
    name: str,
    spaces: Sequence[Space],
    metric: str,
    rows: Sequence[TrialRow],
    facts: Mapping[str, str],
    version: str,
) -> str:
    """The page.

    Args:
        name: of the sweep.
        spaces: of its keys.
        metric: by which trials are compared.
        rows: the trials, the best one first.
        facts: what else is said, as text; `command` is what trains with the best values.
    """
    keys = [space.key for space in spaces]
    head = [*row_head(metric, keys), "why"]
    cells: list[list[Cell]] = [[*row.cells(keys), row.why] for row in rows]
    command = facts.get("command", "")
    best = f"<pre>{escape(command)}</pre>" if command else "<p>No trial has finished yet.</p>"
    others = [(key, value) for key, value in facts.items() if key != "command"]
    body = _BODY.format(
        best=best,
        trials=table(head, cells, "The best first"),
        facts=table(["setting", "value"], others, "Settings"),
    )
    data = {
        "axes": [*map(_axis, spaces), _metric_axis(metric, rows)],
        "trials": _lines(spaces, metric, rows),
    }
    title = f"ktrainer sweep: {escape(name)}"
    return html_page(title, body, data, ("report_charts.js", "sweep.js"), version)


def _axis(space: Space) -> dict[str, Any]:
    if space.kind == "choice":
        return {"name": space.key, "kind": "choice", "choices": space.choices}
    kind = "log" if space.kind == "log" else "linear"
    return {"name": space.key, "kind": kind, "low": space.low, "high": space.high}


def _metric_axis(metric: str, rows: Sequence[TrialRow]) -> dict[str, Any]:
    values = [row.value for row in rows if row.value is not None] or [0.0, 1.0]
    low, high = min(values), max(values)
    kind = "log" if 0 < low < high / _LOG else "linear"
    return {"name": metric, "kind": kind, "low": low, "high": high}


def _lines(spaces: Sequence[Space], metric: str, rows: Sequence[TrialRow]) -> list[dict[str, Any]]:
    """A line for each trial: its places on the axes, and its own among all (0 the best, 1 the
    worst; null: it has no value)."""
    valued = [row for row in rows if row.value is not None]
    valued.sort(key=lambda row: row.state != "finished")  # stable: the best first
    most = max(1, len(valued) - 1)
    places = {row.number: k / most for k, row in enumerate(valued)}
    lines = []
    for row in rows:
        tried = "\n".join(f"{s.key} = {value_text(row.values[s.key])}" for s in spaces)
        said = "" if row.value is None else f", {metric} {number_text(row.value)}"
        at = [_at(space, row.values[space.key]) for space in spaces]
        lines.append(
            {
                "at": [*at, row.value],
                "place": places.get(row.number),
                "text": f"trial {row.number}: {row.state}{said}\n{tried}",
            }
        )
    return lines


def _at(space: Space, value: Value) -> Any:
    return space.choices.index(str(value)) if space.kind == "choice" else value
