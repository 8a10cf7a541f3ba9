"""The page of `ktrainer report`: one HTML file that loads nothing and sends nothing.

Texts and tables are HTML, as `report_tables` writes them; `report.js`, `report_charts.js` and
`report_schedule.js` draw the pictures, from the JSON in the page. `html_page` has what is around
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from ktrainer.runs.html_page import html_page
from ktrainer.runs.report_data import MOST_MARKS, has_many_marks, is_thinned, page_data, run_names
from ktrainer.runs.report_schedule import MeasuredSchedule, measured_schedule
from ktrainer.runs.report_tables import (
    Cell,
    differences,
    marks_table,
    run_card,
    schedule_table,
    table,
    times_table,
    values_table,
)
from ktrainer.runs.run_curves import PARTS
from ktrainer.runs.run_differences import recorded_facts
from ktrainer.runs.run_record import RunRecord

_CARDS_AND_CURVES = """<div class="cards">{cards}</div>
<section id="curves" hidden><h2>Curves</h2><div id="toolbar" class="toolbar"></div>
<div id="charts"></div><p class="quiet">{notes}</p></section>
<noscript><p>The curves need JavaScript, which is off. Values at the end are below.</p></noscript>
{sections}"""
_RUNNING_MEANS = "Inside an epoch, logged values are means over the epoch so far."
_FEWER_MARKS = " Of more than {most} marks of a kind some are drawn, spread evenly."
_THINNED = (
    " Long curves are thinned out: of each of {parts} parts the first, last, lowest and highest "
    "value is drawn; smoothed lines go through the means of the parts."
)


def report_page(records: Sequence[RunRecord], version: str) -> str:
    """The page about some runs, the first of which the others are compared with."""
    names, data = run_names(records), page_data(records)
    schedules = [measured_schedule(record) for record in records]
    for run, schedule in zip(data["runs"], schedules, strict=True):
        run["schedule"] = schedule.steps if schedule is not None else []
    cards = [run_card(record, name, k) for k, (record, name) in enumerate(_named(records, names))]
    notes = _RUNNING_MEANS + (_THINNED.format(parts=PARTS) if is_thinned(data) else "")
    if any(has_many_marks(record) for record in records):
        notes += _FEWER_MARKS.format(most=MOST_MARKS)
    return html_page(
        f"ktrainer report: {_title(names)}",
        _CARDS_AND_CURVES.format(
            cards="".join(cards),
            notes=notes,
            sections=_sections(records, names, data["fit"], schedules),
        ),
        data,
        ("report_charts.js", "report_schedule.js", "report.js"),
        version,
    )


def _title(names: Sequence[str]) -> str:
    return escape(", ".join(names)) if len(names) <= 3 else f"{len(names)} runs"


def _named(records: Sequence[RunRecord], names: Sequence[str]) -> list[tuple[RunRecord, str]]:
    return list(zip(records, names, strict=True))


def _sections(
    records: Sequence[RunRecord],
    names: Sequence[str],
    fit: str,
    schedules: Sequence[MeasuredSchedule | None],
) -> str:
    """All sections below the curves; those without content are left out."""
    named = _named(records, names)
    times = "".join(times_table(record, name) for record, name in named)
    several = len(records) > 1
    sections = [
        ("What happened", _drawn("timeline") + _folded("As a list", _all_marks(named))),
        ("Values", values_table(records, names, fit)),
        ("Differences", differences(records, names) if several else ""),
        ("Where the time went", _drawn("times") + _folded("As a table", times) if times else ""),
        ("The pipeline's schedule", _schedules(schedules, names)),
        ("Environment", _environment(records, names)),
        ("Settings", "".join(_settings(record, name, several) for record, name in named)),
    ]
    return "".join(
        f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content
    )


def _drawn(name: str) -> str:
    return f'<div id="{name}"></div>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _schedules(schedules: Sequence[MeasuredSchedule | None], names: Sequence[str]) -> str:
    """Actions of stages as a picture and as sums, and what there is not."""
    found = [(each, name) for each, name in zip(schedules, names, strict=True) if each is not None]
    notes = [
        f'<p class="quiet">{escape(f"{name}: " if len(names) > 1 else "")}{escape(each.note)}</p>'
        for each, name in found
        if each.note
    ]
    tables = "".join(schedule_table(each, name) for each, name in found if each.steps)
    picture = _drawn("schedule") + _folded("As a table", tables) if tables else ""
    return picture + "".join(notes)


def _all_marks(named: Sequence[tuple[RunRecord, str]]) -> str:
    return "".join(marks_table(record, name) for record, name in named)


def _environment(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Versions, devices, code, model and data of all runs."""
    facts = [recorded_facts(record) for record in records]
    for known, record in zip(facts, records, strict=True):
        last = record.starts[-1] if record.starts else {}
        known |= {key: str(last[key]) for key in ("host", "pid") if key in last}
    keys = dict.fromkeys(key for known in facts for key in known)
    rows: list[list[Cell]] = [
        [key, *(known.get(key, "") for known in facts)]
        for key in keys
        if not key.startswith("settings.")
    ]
    if not rows:
        return ""
    return _folded(
        "Versions, devices, code, model and data", table(["fact", *names], rows, "Facts")
    )


def _settings(record: RunRecord, name: str, several: bool) -> str:
    """The keys that were set, and all of them."""
    changed = _changed_keys(record.folder / "config.diff.yaml")
    facts = recorded_facts(record)
    rows = [
        (key.removeprefix("settings."), value)
        for key, value in facts.items()
        if key.startswith("settings.")
    ]
    own = f"<pre>{escape(changed)}</pre>" if changed else ""
    of = f" of {name}" if several else ""
    if several and own:
        own = _folded(f"Settings{of} that are not defaults", own)
    every = _folded(f"All settings{of}", table(["key", "value"], rows, name)) if rows else ""
    return own + every


def _changed_keys(file: Path) -> str:
    """The settings that are not defaults, as the run has described them; empty if it has not."""
    try:
        text = file.read_bytes()[:20_000].decode(errors="replace").strip()
    except OSError:
        return ""
    return "" if text == "{}" else text
