"""The parts of a report that are text: facts, tables and lists, as HTML.

All texts of a record are escaped: any of them may have been written by someone else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from ktrainer.runs.report_data import fit_name, time_shares, total_shares
from ktrainer.runs.report_schedule import MeasuredSchedule, seconds_by_kind
from ktrainer.runs.run_curves import is_number, metric_order
from ktrainer.runs.run_differences import Difference, compare, facts_of_all
from ktrainer.runs.run_marks import Mark, duration_text, run_marks, stood_out
from ktrainer.runs.run_record import RunRecord
from ktrainer.runs.weight_digests import weight_digests
from ktrainer.runtime.history_file import place

MOST_MARKS = 300  # in the list of what happened
MOST_CHARACTERS = 2000  # of a text
_DIFFERENT_ARRAYS = 10

Cell = str | tuple[str, str]  # a text, or with the name of its style


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str) -> str:
    """A table; the first column names its rows. Wide ones scroll."""
    tops = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table>'
        f"<caption>{_text(caption)}</caption><thead><tr>{tops}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[Cell]) -> str:
    first, *others = (cell if isinstance(cell, tuple) else (cell, "") for cell in cells)
    style = f' class="{first[1]}"' if first[1] else ""
    said = f'<th scope="row"{style}>{_text(first[0])}</th>'
    return said + "".join(
        f'<td class="{style}">{_text(text)}</td>' if style else f"<td>{_text(text)}</td>"
        for text, style in others
    )


def _text(value: object) -> str:
    text = str(value)
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
    return escape(cut.encode(errors="replace").decode())  # a lone surrogate is no UTF-8


def number_text(value: Any) -> str:
    """`0.1234`, `1.5e-07`, `nan`."""
    return f"{float(value):.5g}"


# -- each run


def run_card(record: RunRecord, name: str, number: int) -> str:
    """The state of a run, and how to resume it."""
    state = record.state[0]
    facts = "".join(
        f"<dt>{_text(label)}</dt><dd>{said}</dd>" for label, said in _facts(record) if said
    )
    warnings = "".join(f"<li>{_text(line)}</li>" for line in stood_out(record))
    seen = f'<h3>What stood out</h3><ul class="warnings">{warnings}</ul>' if warnings else ""
    seen = f"<div>{seen}</div>" if seen else ""
    known = state if state in ("running", "finished", "interrupted", "failed") else "other"
    return (
        f'<article class="card"><h2><span class="swatch run-{number % 6}" aria-hidden="true">'
        f'</span>{_text(name)} <span class="state {known}">{_text(state)}</span></h2>'
        f'<div class="columns"><dl>{facts}</dl>{seen}</div></article>'
    )


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    last = record.starts[-1] if record.starts else {}
    epoch, step = record.progress
    epochs = last.get("epochs")
    of = f" of {epochs}" if is_number(epochs) else ""
    started = record.started
    best = [f"{_text(n)} {number_text(v.value)}" for n, v in _best(record)]
    code = f"<code>{_text(record.folder.absolute())}</code>"
    checkpoint = f"<code>{_text(record.checkpoint)}</code>" if record.checkpoint else ""
    unfinished = record.state[0] in ("interrupted", "failed")
    return [
        ("progress", f"epoch {epoch}{_text(of)}, step {step}"),
        ("started", "" if started is None else _text(_date(started))),
        ("took", _text(duration_text(record))),
        ("best", ", ".join(best)),
        ("trained by", _text(_processes(last))),
        ("folder", code),
        ("checkpoint", checkpoint),
        ("resume", _text(record.resume) if unfinished and record.resume else ""),
    ]


def _best(record: RunRecord) -> list[tuple[str, Any]]:
    """The best values of validation, or else of training."""
    names = [name for name in record.best if name.startswith("val_")] or list(record.best)
    return [(name, record.best[name]) for name in sorted(names, key=metric_order)[:4]]


def _processes(start: Mapping[str, Any]) -> str:
    settings = start.get("settings", {})
    backend = settings.get("backend") if isinstance(settings, dict) else None
    name = backend.get("name") if isinstance(backend, dict) else None
    ranks, host = start.get("ranks"), start.get("host")
    count = f"{ranks} process{'' if ranks == 1 else 'es'}" if is_number(ranks) else ""
    where = f"on {host}" if host else ""
    said = " ".join(filter(None, [count, where]))
    return ", ".join(filter(None, [said, f"backend {name}" if name else ""]))


def _date(seconds: float) -> str:
    try:
        return time.strftime("%F %T", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s"


# -- values


def values_table(records: Sequence[RunRecord], names: Sequence[str], fit: str) -> str:
    """The last and the best value of each metric in one `fit`, of all runs.

    Args:
        fit: its name, as `fit_name` has it.
    """
    places = [next((p for p in record.fits if fit_name(p) == fit), None) for record in records]
    last = [_last_values(*each) for each in zip(records, places, strict=True)]
    best = [
        {} if where is None else record.best_of(where)
        for record, where in zip(records, places, strict=True)
    ]
    metrics = sorted({name for each in last for name in each}, key=metric_order)
    if not metrics:
        return "<p>No values are recorded yet.</p>"
    several = len(records) > 1
    head = ["metric"]
    for name in names:
        head += [f"{name}: last", f"{name}: best"] if several else ["last", "best"]
    rows = []
    for metric in metrics:
        cells: list[Cell] = [metric]
        for values, bests in zip(last, best, strict=True):
            cells.append((number_text(values[metric]) if metric in values else "", "number"))
            found = bests.get(metric)
            cells.append(f"{number_text(found.value)} (epoch {found.epoch})" if found else "")
        rows.append(cells)
    of = f" of fit {fit}" if any(len(record.fits) > 1 for record in records) else ""
    return table(head, rows, f"Values at the end{of}")


def _last_values(record: RunRecord, fit: tuple[int, int] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for row in record.rows:
        if place(row) == fit:
            values |= row["metrics"]
    return values


# -- what happened


def marks_table(record: RunRecord, name: str) -> str:
    """All that happened, with the time since the start."""
    marks = run_marks(record)
    important = [mark for mark in marks if mark.kind != "checkpoint"]
    shown = marks if len(marks) <= MOST_MARKS else important[-MOST_MARKS:]  # the newest
    begin = next((mark.time for mark in marks if mark.time is not None), 0.0)
    rows = [(_since(mark, begin), mark.text, _step(mark)) for mark in shown]
    left = len(marks) - len(shown)
    caption = f"{name}: what happened" + (f" ({left} checkpoints or others left out)" * (left > 0))
    return table(["after", "what", "step"], rows, caption)


def _step(mark: Mark) -> Cell:
    return ("" if mark.step is None else str(mark.step), "number")


def _since(mark: Mark, begin: float) -> str:
    if mark.time is None:
        return ""
    seconds = round(mark.time - begin)
    hours, minutes = divmod(abs(seconds) // 60, 60)
    return f"{'-' * (seconds < 0)}{hours}:{minutes:02d}:{abs(seconds) % 60:02d}"


def times_table(record: RunRecord, name: str) -> str:
    """Shares of each rank's time; empty where they are not recorded."""
    ranks = total_shares(time_shares(record))
    kinds: dict[str, float] = {}
    for shares in ranks.values():
        for kind, seconds in shares.items():
            kinds[kind] = kinds.get(kind, 0.0) + seconds
    rows: list[list[Cell]] = []
    for kind in sorted(kinds, key=lambda kind: -kinds[kind]):
        cells = [(_share(shares.get(kind), shares), "number") for shares in ranks.values()]
        rows.append([kind, *cells])
    changed = any(event["event"] == "ranks" for event in record.outer)
    caption = f"{name}: seconds by rank" + ", numbered as at the last start" * changed
    return table(["spent on", *ranks], rows, caption) if rows else ""


def schedule_table(schedule: MeasuredSchedule, name: str) -> str:
    """Milliseconds of each stage in the last measured step, by kind of action."""
    step = schedule.steps[-1]
    sums = [(lane["name"], seconds_by_kind(lane)) for lane in step["lanes"]]
    kinds = list(dict.fromkeys(kind for _, by_kind in sums for kind in by_kind))
    rows: list[list[Cell]] = [
        [lane, *((f"{by_kind.get(kind, 0.0) * 1e3:.4g}", "number") for kind in kinds)]
        for lane, by_kind in sums
    ]
    caption = f"{name}: milliseconds in {step['label']}; waits are also in the actions around them"
    return table(["", *kinds], rows, caption)


def _share(seconds: float | None, shares: Mapping[str, float]) -> str:
    whole = sum(shares.values())
    if seconds is None or not whole:
        return ""
    return f"{seconds:.3g} s ({seconds / whole:.1%})"


# -- several runs


def differences(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Differences of several runs: values, facts and weights."""
    firsts = []
    for record, name in zip(records[1:], names[1:], strict=True):
        found = compare(records[0], record)
        first = next(iter(found.first.values()), None)
        said = _first_text(first) if first else f"no difference in {found.points} rows"
        texts = [said if found.points else "no values of the same metric at the same step"]
        for which, metrics in zip((names[0], name), found.only, strict=True):
            texts += [f"only {which} has {', '.join(metrics)}"] if metrics else []
        firsts.append([f"{name} beside {names[0]}", "; ".join(texts)])
    facts = facts_of_all(records)
    elements = [table(["runs", "first difference of values"], firsts, "Values")]
    if facts:
        rows: list[list[Cell]] = [[name, *texts] for name, texts in facts.items()]
        elements.append(table(["differs", *names], rows, "Settings, code, versions and data"))
    else:
        elements.append("<p>No settings, versions, code or data are known to differ.</p>")
    return "".join([*elements, _weights(records, names)])


def _first_text(first: Difference) -> str:
    values = " and ".join(repr(value) for value in first.values)
    size = f", relative {first.relative:.2g}" if math.isfinite(first.relative) else ""
    where = f"step {first.step} (epoch {first.epoch})"
    return f"at {where}, in {first.metric}: {values}{size}"


def _weights(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    found = weight_digests(records)
    if found.problem:
        return f"<p>Weights are not compared: {_text(found.problem)}.</p>"
    different = found.differing
    arrays = max(len(each) for each in found.digests if each is not None)
    if not different:
        which = [n for n, each in zip(names, found.digests, strict=True) if each is not None]
        said = f"All {arrays} arrays of weights are the same after {found.when}"
        return f"<p>{_text(said)}: {_text(', '.join(which))}.</p>"
    rows = [
        [
            array,
            *("(none)" if each is None else each.get(array, "(none)") for each in found.digests),
        ]
        for array in different[:_DIFFERENT_ARRAYS]
    ]
    caption = f"Digests of weights after {found.when}: {len(different)} of {arrays} differ"
    return table(["array", *names], rows, caption)
