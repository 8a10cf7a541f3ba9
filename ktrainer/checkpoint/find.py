"""The checkpoints that a path names: of a run, of a folder of them, or one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.format import MANIFEST
from ktrainer.checkpoint.reading import read_manifest
from ktrainer.checkpoint.store import Entry, Store
from ktrainer.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk.

    Attributes:
        path: its folder.
        manifest: what it says of itself; None if that cannot be read.
        marks: `latest`, and `best (NAME=VALUE)`.
        problem: why its manifest cannot be read.
    """

    path: Path
    manifest: dict[str, Any] | None
    marks: tuple[str, ...] = ()
    problem: str = ""


def folders(path: Path) -> list[tuple[Path, list[Found]]]:
    """The folders of checkpoints that `path` names, each with its checkpoints, the latest first.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).exists():
        return [(path.parent, [_found(Entry(path, 0, 0), ())])]
    stores = [path, *sorted(path.glob("checkpoints*"))]
    found = [(Store(folder), Store(folder).entries()) for folder in stores if folder.is_dir()]
    listed = [(store.directory, _marked(store, entries)) for store, entries in found if entries]
    if not listed:
        raise CheckpointError(
            f"{path}: there is no checkpoint. Give the folder of one (with a {MANIFEST}), or of a "
            "run."
        )
    return listed


def chosen(path: Path, best: bool = False) -> Found:
    """The checkpoint that `path` names; of several, the latest or the best.

    Raises:
        CheckpointError: there is none, or none was judged.
    """
    every = [found for _, listed in folders(path) for found in listed]
    if not best:
        return next((found for found in every if found.manifest is not None), every[0])
    for found in every:
        if any(mark.startswith("best") for mark in found.marks):
            return found
    raise CheckpointError(
        f"{path}: no checkpoint is marked best: train with checkpoint.best=val_loss, or leave "
        "--best out"
    )


def _marked(store: Store, entries: Sequence[Entry]) -> list[Found]:
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


def _found(entry: Entry, marks: tuple[str, ...]) -> Found:
    try:
        return Found(entry.path, read_manifest(entry.path), marks)
    except CheckpointError as error:
        return Found(entry.path, None, marks, str(error))
