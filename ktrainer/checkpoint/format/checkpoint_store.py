"""The checkpoints of a run: list them, find the latest and the best, save, prune."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.format.checkpoint_folder import (
    MANIFEST,
    Described,
    fault_point,
    finish_checkpoint,
    temporary_checkpoint,
    write_arrays,
)
from ktrainer.checkpoint.format.checkpoint_reader import read_manifest
from ktrainer.errors import CheckpointError
from ktrainer.runtime.run_folder import library_versions

_NAME = re.compile(r"step-(\d{8,})(?:-\d+)?")


@dataclass(frozen=True)
class Entry:
    """A checkpoint folder.

    Attributes:
        path: the folder.
        step: updates done when it was saved.
        serial: its number in the order of saving; 0 when its manifest cannot be read.
        metric: monitored metric's name and value, when one was monitored.
        mode: whether a low (`min`) or a high value (`max`) of it is better; empty when unknown.
        run: name of the run that saved it, the same over restarts; empty when unknown.
        problem: reason why the manifest cannot be read; None when it can.
        call: facts of the call of `fit` that saved it; empty when unknown.
    """

    path: Path
    step: int
    serial: int
    metric: tuple[str, float] | None = None
    run: str = ""
    problem: str | None = None
    mode: str = ""
    call: Mapping[str, str] = field(default_factory=dict)


class Store:
    """The folder of a run's checkpoints. Used on rank 0 alone."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def entries(self) -> list[Entry]:
        """All checkpoints, the latest saved first; unreadable ones before all others."""
        if not self.directory.is_dir():
            return []
        found = [
            _entry(path, int(match[1]))
            for path in self.directory.iterdir()
            if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
        ]
        # In the order of saving, not of steps: a fresh run in an old folder starts at step 0.
        return sorted(found, key=lambda e: (e.problem is not None, e.serial, e.step), reverse=True)

    def latest(self) -> Entry | None:
        """The checkpoint saved last whose manifest can be read."""
        return next((entry for entry in self.entries() if entry.problem is None), None)

    def best(self, monitor: str, mode: str, run: str | None = None) -> Entry | None:
        """The checkpoint with the best value of `monitor`; the earlier one when equal.

        Args:
            mode: `min` or `max`.
            run: among those of this run; None: among all.
        """
        return _best(self.entries(), monitor, mode, run)

    def save(
        self,
        arrays: Mapping[str, np.ndarray],
        state: Mapping[str, Any] | bytes,
        step: int,
        *,
        facts: Mapping[str, Any] | None = None,
        texts: Mapping[str, bytes] | None = None,
        temporary: Path | None = None,
        write: Callable[..., Described] | None = None,
    ) -> Path:
        """Write a checkpoint of `step`; return its folder. An existing one is replaced, but the
        best of another run is renamed first.

        Args:
            facts: more entries of the manifest, such as `metric` and `run` of an `Entry`.
            texts: more files, by name.
            temporary: a folder of `make_temporary`; None: make it.
            write: called as `write(folder=..., arrays=...)` to write the arrays; default: write
                them in this process.

        Raises:
            CheckpointError: it could not be written; the others are untouched.
        """
        path = self.path_of(step)
        with temporary_checkpoint(path, temporary) as folder:
            described = (write or write_arrays)(folder=folder, arrays=arrays)
            serial = max((entry.serial for entry in self.entries()), default=0) + 1
            saved = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            own = {"step": step, "serial": serial, "saved": saved, **(facts or {})}
            own["versions"] = library_versions()
            self._spare_best(path, str(own.get("run", "")))
            finish_checkpoint(folder, path, described, state, own, texts)
        return path

    def _spare_best(self, path: Path, run: str) -> None:
        """Rename the checkpoint `path` if it is the best of another run than `run`."""
        there = next((entry for entry in self.entries() if entry.path == path), None)
        if there is None or there.metric is None or there.run == run:
            return
        best = self.best(there.metric[0], there.mode or "min", there.run)
        if best == there:
            names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
            os.rename(path, next(name for name in names if not name.exists()))

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint of `step`."""
        return self.directory / f"step-{step:08d}"

    def prune(self, keep: int, best_step: int | None = None) -> None:
        """Remove all but the `keep` checkpoints saved last, and the best of each run by each metric
        that it has monitored.

        A fresh run in an old folder keeps its own best beside a better one of an earlier run, and
        one that continues with another metric, or none, the best by the earlier one. Unreadable
        checkpoints are kept for inspection.

        Args:
            best_step: where the run stands at its best; its folder may have a better one that it
                saved before it went back to an older checkpoint.
        """
        good = [entry for entry in self.entries() if entry.problem is None]
        kept = {entry.path for entry in good[:keep]}
        if best_step is not None:
            kept.add(self.path_of(best_step))
        for name, known, run in {(e.metric[0], e.mode, e.run) for e in good if e.metric}:
            for mode in (known,) if known else ("min", "max"):  # earlier versions saved none
                best = _best(good, name, mode, run)
                assert best is not None
                kept.add(best.path)
        for entry in good:
            if entry.path not in kept:
                self.remove(entry.path)

    def remove(self, path: Path) -> None:
        """Remove the checkpoint `path`."""
        # Renamed first: a half-removed checkpoint must not look like one.
        gone = path.parent / f".{path.name}.gone"
        fault_point("before prune", path)
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        fault_point("while pruning", path)
        shutil.rmtree(gone, ignore_errors=True)

    def sweep(self, name: str = r"step-\d{8,}(?:-\d+)?", alone: bool = True) -> None:
        """Clean up after an interrupted save or removal.

        Args:
            name: a pattern of the names of checkpoints.
            alone: False: another process may be saving, so nothing is removed.
        """
        if not self.directory.is_dir():
            return
        leftover = re.compile(rf"\.(?P<name>{name})\.(?P<kind>tmp-\d+|old|gone)")
        for path in list(self.directory.iterdir()):
            match = leftover.fullmatch(path.name)
            if match is None:
                continue
            final = self.directory / match["name"]
            if match["kind"] == "old" and not final.exists():
                with suppress(FileNotFoundError):  # another rank has done it
                    os.rename(path, final)  # killed between two renames: restore the old one
            elif alone:
                shutil.rmtree(path, ignore_errors=True)


def _best(entries: list[Entry], monitor: str, mode: str, run: str | None) -> Entry | None:
    """The best of `entries`, of which the latest saved is first; as `Store.best`."""
    scored = [
        (entry.metric[1] if mode == "min" else -entry.metric[1], entry)
        for entry in reversed(entries)
        if entry.metric and entry.metric[0] == monitor and run in (None, entry.run)
    ]
    return min(scored, key=lambda each: each[0], default=(0.0, None))[1]


def _entry(path: Path, step: int) -> Entry:
    try:
        manifest = read_manifest(path)
        metric = manifest.get("metric")
        scored = (str(metric["name"]), float(metric["value"])) if metric else None
        mode = str(metric.get("mode", "")) if metric else ""
        run, serial = str(manifest.get("run", "")), int(manifest.get("serial", 0))
        call = {str(key): str(value) for key, value in manifest.get("call", {}).items()}
        return Entry(path, step, serial, scored, run, mode=mode, call=call)
    except CheckpointError as error:
        return Entry(path, step, 0, problem=str(error))
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        return Entry(path, step, 0, problem=f"{path / MANIFEST} is damaged: {error}")
