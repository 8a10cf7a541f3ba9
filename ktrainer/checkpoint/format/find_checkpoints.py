"""Find the checkpoints that a path names: those of a run, of a folder, or one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST
from ktrainer.checkpoint.format.checkpoint_reader import read_manifest
from ktrainer.checkpoint.format.checkpoint_store import Entry, Store
from ktrainer.errors import CheckpointError

_OF_FIT = re.compile(r"checkpoints(?:-(\d+))?")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint on the disk.

    Attributes:
        path: its folder.
        manifest: its manifest; None if it cannot be read.
        marks: `latest`, and `best (NAME=VALUE)`.
        problem: reason why its manifest cannot be read.
    """

    path: Path
    manifest: dict[str, Any] | None
    marks: tuple[str, ...] = ()
    problem: str = ""


def checkpoint_folders(path: Path) -> list[tuple[Path, list[FoundCheckpoint]]]:
    """The folders of checkpoints that `path` names, in the order of the script's calls of `fit`,
    each with its checkpoints, the latest first.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists():
        return [(path.parent, [_found(Entry(path, 0, 0), ())])]
    stores = [path, *sorted(path.glob("checkpoints*"), key=_place)]
    found = [(Store(folder), Store(folder).entries()) for folder in stores if folder.is_dir()]
    listed = [(store.directory, _marked(store, entries)) for store, entries in found if entries]
    if not listed:
        raise CheckpointError(
            f"{path}: there is no checkpoint. Give the folder of one (with a {MANIFEST}), or of a "
            "run."
        )
    return listed


def select_checkpoint(path: Path, best: bool = False) -> FoundCheckpoint:
    """The checkpoint that `path` names; of several, the one saved last, or the best of the `fit`
    that saved last.

    Raises:
        CheckpointError: there is none, or that `fit` has no best.
    """
    each = [(_latest(listed), folder, listed) for folder, listed in checkpoint_folders(path)]
    latest, folder, listed = max(each, key=lambda one: (_saved(one[0]), _place(one[1])))
    if not best:
        return latest
    for found in listed:
        if any(mark.startswith("best") for mark in found.marks):
            return found
    other = ", or name the folder of another fit" if len(each) > 1 else ""
    raise CheckpointError(
        f"{folder}: no checkpoint is marked best: train with checkpoint.best=val_loss, or remove "
        f"--best{other}"
    )


def _latest(listed: Sequence[FoundCheckpoint]) -> FoundCheckpoint:
    """The latest readable checkpoint of one folder."""
    return next((found for found in listed if found.manifest is not None), listed[0])


def _saved(found: FoundCheckpoint) -> float:
    """The time of the save, in seconds; 0 if unknown."""
    with suppress(TypeError, ValueError, OverflowError):
        text = (found.manifest or {}).get("saved")
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()  # type: ignore[arg-type]
    return 0.0


def _place(folder: Path) -> tuple[int, str]:
    """Sort key of a folder: the number of its `fit` (0 for a copy under another name), and its
    name."""
    match = _OF_FIT.fullmatch(folder.name)
    return int(match[1] or 1) if match else 0, folder.name


def _marked(store: Store, entries: Sequence[Entry]) -> list[FoundCheckpoint]:
    latest = store.latest()
    listed = []
    for entry in entries:
        marks = ["latest"] if latest is not None and entry.path == latest.path else []
        if entry.metric is not None and entry.mode:
            best = store.best(entry.metric[0], entry.mode, entry.run)
            if best is not None and best.path == entry.path:
                marks.append(f"best ({entry.metric[0]}={entry.metric[1]:g})")
        listed.append(_found(entry, tuple(marks)))
    return listed


def _found(entry: Entry, marks: tuple[str, ...]) -> FoundCheckpoint:
    try:
        return FoundCheckpoint(entry.path, read_manifest(entry.path), marks)
    except CheckpointError as error:
        return FoundCheckpoint(entry.path, None, marks, str(error))
