"""`ktrainer compare`: the first step at which two runs differ, and what else differs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from ktrainer.runs.run_differences import Difference, RunDifferences, compare
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import spelled

_SHOWN = 20
_WIDEST = 60  # characters of a fact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer compare`."""
    parser.description = (
        "Compare the recorded values of two runs: the first step at which they differ, in which "
        "metric and by how much; and which settings, versions, data, code and numbers of ranks "
        "differ. Status 1 when values differ, 2 when there are none to compare. A run records "
        "values every logging.every: with logging.every=1ba, at each step."
    )
    parser.add_argument("runs", metavar="RUN", nargs=2, help="the folder of a run")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="R",
        help="relative difference that does not count, such as 1e-6 (default: 0, equal to the bit)",
    )
    parser.add_argument("--json", action="store_true", help="all that was found, as JSON")


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print what differs; the exit status is 1 if values do, 2 if there are none in common."""
    a, b = (RunRecord(Path(path)) for path in args.runs)
    found = compare(a, b, args.tolerance)
    if args.json:
        runs = {"runs": [record.summary() for record in (a, b)], "tolerance": args.tolerance}
        print(json.dumps(spelled({**runs, **found.to_dict()}), indent=2))
    else:
        print("\n".join([*_heads((a, b)), "", *_values(found, (a, b)), *_facts(found)]))
    if not found.points:
        return 2
    return 1 if found.first else 0


def _heads(records: Sequence[RunRecord]) -> list[str]:
    rows = []
    for name, record in zip("AB", records, strict=True):
        epoch, step = record.progress
        rows.append((name, str(record.folder), record.state[0], f"epoch {epoch}, step {step}"))
    return _aligned(rows)


def _values(found: RunDifferences, records: Sequence[RunRecord]) -> list[str]:
    empty = [name for name, each in zip("AB", records, strict=True) if not each.rows]
    if empty:
        return [f"no values to compare: {' and '.join(empty)} has recorded none"]
    if found.points:
        lines = _differences(found) if found.first else [f"no difference in {found.points} rows"]
        lines += [f"compared: {_where(records)}"]
    else:
        lines = ["no values to compare: they have none of the same metric at the same step"]
    for name, rows, metrics in zip("AB", found.alone, found.only, strict=True):
        lines += [f"only {name} has {', '.join(metrics)}"] if metrics else []
        lines += [f"only {name} has {rows} more rows"] if rows else []
    if found.steps is not None:
        epoch, *steps = found.steps
        lines.append(f"epoch {epoch} ends at step {steps[0]} in A, {steps[1]} in B")
    return lines


def _differences(found: RunDifferences) -> list[str]:
    first = next(iter(found.first.values()))
    fit = "" if first.fit == "1" else f" of fit {first.fit}"
    where = f"step {first.step} (epoch {first.epoch}){fit}"
    before = (
        f"equal up to step {found.equal_until}" if found.equal_until else "equal nowhere before"
    )
    metrics = [d.metric for d in found.first.values() if (d.fit, d.step) == (first.fit, first.step)]
    lines = [f"first difference: {where}, in {', '.join(metrics)}; {before}", ""]
    rows: list[tuple[str, ...]] = [
        ("", "step", "A", "B", "difference", "relative", "largest relative")
    ]
    rows += [_row(each, found.largest[name]) for name, each in found.first.items()]
    return [*lines, *_aligned(rows[: _SHOWN + 1], "  "), ""]


def _row(first: Difference, largest: Difference) -> tuple[str, ...]:
    return (
        first.metric,
        str(first.step),
        *(repr(value) for value in first.values),
        f"{first.absolute:.2g}",
        f"{first.relative:.2g}",
        f"{largest.relative:.2g} at step {largest.step}",
    )


def _where(records: Sequence[RunRecord]) -> str:
    """At which steps the runs have recorded values."""
    every = []
    for record in records:
        settings = record.starts[-1].get("settings", {}) if record.starts else {}
        every.append(str(settings.get("logging", {}).get("every", "?")))
    text = every[0] if every[0] == every[1] else f"{every[0]} in A, {every[1]} in B"
    return f"at ends of epochs, validations and every {text} (logging.every)"


def _facts(found: RunDifferences) -> list[str]:
    lines = ["", "nothing else is known to differ"]
    if found.facts:
        rows: list[tuple[str, ...]] = [("differs", "A", "B")]
        rows += [(name, *_short(*pair)) for name, pair in found.facts.items()]
        lines = ["", *_aligned(rows)]
    for name, changes in zip("AB", found.changed, strict=True):
        for each in changes:
            before, after = _short(each["before"], each["after"])
            lines.append(
                f"{name} was resumed at step {each['step']} with another {each['name']}: "
                f"{before}, then {after}"
            )
    return lines


def _short(a: str, b: str) -> list[str]:
    """Two texts that differ, cut where they are long, so that the difference is seen."""
    pairs = enumerate(zip(a, b, strict=False))
    same = next((k for k, (one, other) in pairs if one != other), min(len(a), len(b)))
    start = max(0, same - _WIDEST // 3) if max(len(a), len(b)) > _WIDEST else 0
    short = [("..." if start else "") + text[start:] for text in (a, b)]
    return [text if len(text) <= _WIDEST else f"{text[: _WIDEST - 3]}..." for text in short]


def _aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
