"""Records that outlive a restart of all processes by the launcher.

`ktrainer run --max-restarts` keeps a folder, named in the environment, from one start to the next.
In it rank 0 records each checkpoint, by which the launcher sees whether restarts make progress, and
run folders whose names were made from the time, so that a later start finds its checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

COUNT = "KTRAINER_RESTART"  # how often the group has been restarted
RECORDS = "KTRAINER_RECORDS"  # the folder
_SAVES, _RUNS = "saves.jsonl", "runs.jsonl"


def count(environ: dict[str, str] | os._Environ[str] = os.environ) -> int:
    """The number of restarts of this group by the launcher."""
    value = environ.get(COUNT, "")
    return int(value) if value.isdigit() else 0


def note_save(directory: Path, step: int, run: str) -> None:
    """Record a checkpoint of `step`, saved by `run` in `directory`; rank 0 only, any thread."""
    if records := os.environ.get(RECORDS):
        _note(Path(records) / _SAVES, [str(directory.absolute()), step, run])


def saves(records: Path) -> dict[str, int]:
    """The latest step that was recorded for each folder of checkpoints."""
    furthest: dict[str, int] = {}
    for directory, step, _ in _lines(records / _SAVES):
        furthest[directory] = max(step, furthest.get(directory, step))
    return furthest


def run_before(directory: Path) -> str | None:
    """The run that saved the last checkpoint in `directory` before this start; None if there is
    none."""
    records = os.environ.get(RECORDS)
    if not records or not count():
        return None
    here = str(directory.absolute())
    runs = [run for place, _, run in _lines(Path(records) / _SAVES) if place == here]
    return runs[-1] if runs else None


def run_folder(make: Callable[[], Path]) -> Path:
    """The folder that the latest earlier start opened as its n-th, n being the number that this
    start has opened, plus one; else `make()`. Rank 0 only."""
    records = os.environ.get(RECORDS)
    if not records:
        return make()
    starts: dict[int, list[str]] = {}
    for folder, start in _lines(Path(records) / _RUNS):
        starts.setdefault(start, []).append(folder)
    # Counted in the file: where ranks heal, this process may not have been rank 0 before.
    point = len(starts.pop(count(), ()))
    known = [folders[point] for folders in starts.values() if len(folders) > point]
    path = Path(known[-1]) if known else make().absolute()
    _note(Path(records) / _RUNS, [str(path), count()])
    return path


def _note(path: Path, record: list[Any]) -> None:
    # On a line of its own: the one before may be incomplete if its writer was killed.
    with path.open("a") as file:
        file.write(f"\n{json.dumps(record)}\n")


def _lines(path: Path) -> list[Any]:
    """The complete records."""
    records = []
    for line in path.read_text(errors="replace").split("\n") if path.exists() else ():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
