"""`ktrainer runs`: list the runs in a folder: state, progress, best values, how to resume."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktrainer.errors import ConfigError
from ktrainer.runs.run_record import RunRecord, find_runs
from ktrainer.runs.sweep_summary import read_best_trial
from ktrainer.runtime.history_file import spelled

_SHOWN = 2  # best values in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ktrainer runs`."""
    parser.description = (
        "List the runs in a folder, the newest first: whether each is running, finished, "
        "interrupted or failed and why, how far it is, its best values, and how to resume it; of a "
        "sweep, its best trial and the command that trains with its values."
    )
    parser.add_argument(
        "path",
        metavar="DIR",
        nargs="?",
        default="runs",
        help="a folder of runs, or of one run (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    found, problems = [], []
    for folder in find_runs(Path(args.path)):
        try:
            found.append(RunRecord(folder, logs=False))
        except ConfigError as error:
            problems.append(str(error))
    found.sort(key=lambda record: record.started or record.last_sign, reverse=True)
    if args.json:
        print(json.dumps(spelled([_summary(record) for record in found]), indent=2))
    else:
        print("\n".join(_lines(found, Path(args.path))))
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 0


def _summary(record: RunRecord) -> dict[str, Any]:
    """All that is known of a run; of the best trial of a sweep, also how to train with its
    values."""
    best = read_best_trial(record.folder.parent)
    if best is not None and best.run != record.folder.name:
        best = None
    return {**record.summary(), "best_of_sweep": best and vars(best)}


def _lines(records: Sequence[RunRecord], where: Path) -> list[str]:
    rows: list[tuple[str, ...]] = [("run", "state", "epoch", "step", "best", "started")]
    rows += [_row(record, where) for record in records]
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row, record in zip(rows, [None, *records], strict=True):
        cells = [
            cell.rjust(width) if k in (2, 3) else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if record is not None:
            lines += [f"  {line}" for line in _notes(record)]
    for folder in sorted({record.folder.parent for record in records if record.folder != where}):
        if (best := read_best_trial(folder)) is not None:
            lines += ["", f"sweep {folder}, {best.text()}"]
    return lines


def _row(record: RunRecord, where: Path) -> tuple[str, ...]:
    epoch, step = record.progress
    epochs = record.starts[-1].get("epochs") if record.starts else None
    started = record.started
    inner = record.folder != where
    return (
        str(record.folder.relative_to(where)) if inner else record.folder.name or ".",
        record.state[0],
        f"{epoch}/{epochs}" if epochs else str(epoch),
        str(step),
        best_text(record),
        "" if started is None else time.strftime("%F %H:%M", time.localtime(started)),
    )


def _notes(record: RunRecord) -> list[str]:
    """Why a run is not finished, and how to resume it."""
    state, why = record.state
    lines = [why] if why else []
    if state in ("interrupted", "failed") and record.resume is not None:
        assert record.checkpoint is not None
        lines.append(f"resume from {record.checkpoint.name}: {record.resume}")
    elif state in ("interrupted", "failed") and record.starts:
        lines.append("no checkpoint to resume from")
    return lines


def best_text(record: RunRecord) -> str:
    """`val_loss 0.2059, val_accuracy 0.9333`: the best values of validation, or of training."""
    best = record.best
    names = [name for name in best if name.startswith("val_")] or list(best)
    names.sort(key=lambda name: (name.removeprefix("val_") != "loss", name))
    return ", ".join(f"{name} {best[name].value:.4g}" for name in names[:_SHOWN])
