"""One run as its record says, and the runs in a folder.

The state of a run:

    running       a process holds the lock of the folder, which the kernel releases when it ends
    finished      the last `fit` has come to its end
    interrupted   asked to end, or killed: a record without an end that no process continues
    failed        an error has ended it

Where the lock does not answer (no locks, or a run on another host whose locks are not seen here),
the record's file tells: a run touches it about every 10 seconds between steps.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ktrainer.errors import ConfigError
from ktrainer.runtime.folder_lock import is_held
from ktrainer.runtime.history_file import NAME, Event, current_rows, end_since, place, read_events

SILENT_SECONDS = 600.0  # without a sign of life for so long, a run on another host is lost
_DEPTH = 3  # levels of folders that are searched for runs
_DESCRIBED = ("config.yaml", "versions.json")  # in the folder before training begins


@dataclass(frozen=True)
class Best:
    """The best value of a metric, in which epoch (from 1), and how many updates were done then."""

    value: float
    epoch: int
    step: int


class RunRecord:
    """One run.

    Args:
        folder: of the run.
        logs: read all rows of `logging.every`; without them, the last alone.

    Raises:
        ConfigError: it is no run's folder, or cannot be read.
    """

    def __init__(self, folder: Path, logs: bool = True) -> None:
        self.folder, self.file = folder, folder / NAME
        check_folder(folder, "Give the folder of a run.")
        if not is_run(folder):
            raise ConfigError(
                f"{folder} is not the folder of a run: it has no {NAME}. `ktrainer runs DIR` lists "
                "the runs in a folder."
            )
        self.events: list[Event] = []
        try:
            if self.file.exists():
                self._read(logs)
        except OSError as error:
            raise ConfigError(f"{self.file} cannot be read: {error.strerror or error}.") from None

    def _read(self, logs: bool) -> None:
        self.events = list(read_events(self.file, () if logs else ("log",)))

    @cached_property
    def starts(self) -> list[Event]:
        """Each time that training began or continued, of all calls of `fit` by the script."""
        return [event for event in self.outer if event["event"] == "start"]

    @cached_property
    def outer(self) -> list[Event]:
        """The events that are not of a `fit` that a callback has called."""
        return [event for event in self.events if not event.get("inside")]

    @cached_property
    def rows(self) -> list[Event]:
        """The rows of all steps that count."""
        return current_rows(self.events)

    @property
    def fits(self) -> list[tuple[int, int]]:
        """The calls of `fit` that have rows, in order."""
        return sorted({place(row) for row in self.rows})

    @cached_property
    def state(self) -> tuple[str, str]:
        """running, finished, interrupted or failed, and why; empty where there is no reason."""
        held = is_held(self.folder)
        if held:
            return "running", ""
        if self.end is not None:
            return self.end["reason"], _why(self.end)
        if not self.starts:
            return "interrupted", "training has not begun"
        if held is None or self.starts[-1].get("host") != socket.gethostname():
            return self._state_by_sign()
        return "interrupted", "killed: its process has ended without a word"

    @property
    def end(self) -> Event | None:
        """How it has ended; None: it has not, or was killed."""
        return end_since(self.outer)

    @property
    def last_sign(self) -> float:
        """The time at which the run was last alive, in seconds since 1970."""
        try:
            return self.file.stat().st_mtime
        except OSError:
            return self.folder.stat().st_mtime

    def _state_by_sign(self) -> tuple[str, str]:
        host, silent = self.starts[-1].get("host"), time.time() - self.last_sign
        if silent < SILENT_SECONDS:
            return "running", f"on {host}: last sign of life {silent:.0f} s ago"
        return "interrupted", f"lost: no sign of life from {host} for {span(silent)}"

    @cached_property
    def last_fit(self) -> tuple[int, int]:
        """The script's last call of `fit`."""
        return place(self.outer[-1]) if self.outer else (1, 0)

    @cached_property
    def progress(self) -> tuple[int, int]:
        """(epochs, updates) done in the last call of `fit`, as far as is recorded."""
        epoch = step = 0
        for event in self.outer:
            if event["event"] == "times":  # also of the present epoch
                continue
            if place(event) == self.last_fit and "step" in event and "epoch" in event:
                step, epoch = event["step"], event["epoch"]
                epoch -= event["event"] in ("log", "validation")  # it counts the present one
        return epoch, step

    @property
    def started(self) -> float | None:
        """The time at which training first began, in seconds since 1970."""
        return self.starts[0]["time"] if self.starts else None

    @cached_property
    def directions(self) -> dict[str, str]:
        """`min` or `max`: whether a lower or a higher value is better, by metric."""
        found: dict[str, str] = {}
        for event in self.events:
            if event["event"] == "metrics":
                found |= event["better"]
        return found

    @cached_property
    def best(self) -> dict[str, Best]:
        """`best_of` the last call of `fit`."""
        return self.best_of(self.last_fit)

    def best_of(self, fit: tuple[int, int]) -> dict[str, Best]:
        """The best value of each metric over the epochs of a call of `fit`."""
        found: dict[str, Best] = {}
        for row in self.rows:
            if row["event"] != "epoch" or place(row) != fit:
                continue
            for name, text in row["metrics"].items():
                value, known = float(text), found.get(name)
                sign = {"min": 1, "max": -1}.get(self.directions.get(name, ""), 0)
                if sign and value == value and (known is None or sign * value < sign * known.value):
                    found[name] = Best(value, row["epoch"], row["step"])
        return found

    @cached_property
    def checkpoint(self) -> Path | None:
        """The checkpoint saved last that is still there, of the last call of `fit` that has one."""
        saved = (self.checkpoints_of(start) for start in reversed(self.starts))
        return next((each[-1] for each in saved if each), None)

    def checkpoints_of(self, start: Event) -> list[Path]:
        """The complete checkpoints in the folder that a start names, in the order of saving."""
        recorded = start.get("checkpoints")
        if not recorded or not isinstance(recorded, str):
            return []
        # Its own first: it may have been moved, or be a copy.
        for folder in (self.folder / Path(recorded).name, Path(recorded)):
            with suppress(OSError):  # another user's, or one that is being deleted
                saved = list(folder.glob("step-*/manifest.json"))
                if saved:
                    saved.sort(key=lambda path: path.stat().st_mtime_ns)
                    return [path.parent for path in saved]
        return []

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the run has been moved or copied, with its checkpoints."""
        assert self.checkpoint is not None
        known = {str(start.get("checkpoints")) for start in self.starts}
        return not any(self.checkpoint.parent.resolve() == Path(path).resolve() for path in known)

    @property
    def resume(self) -> str | None:
        """How to resume; None without a checkpoint."""
        if self.checkpoint is None:
            return None
        words = str(self.starts[-1].get("resume") or "")
        if "CHECKPOINT" in words:
            words = f"checkpoint.resume={self.checkpoint}"
        elif self._is_elsewhere:
            others = [word for word in words.split() if not word.startswith("run.dir=")]
            words = " ".join([f"run.dir={self.folder}", *others])
        return f"the same command with {words}" if words else "the same command"

    def summary(self) -> dict[str, Any]:
        """All of it as a JSON-able dict."""
        (state, why), (epoch, step) = self.state, self.progress
        last = self.starts[-1] if self.starts else {}
        return {
            "run": str(self.folder),
            "state": state,
            "why": why,
            "started": self.started,
            "last_sign": self.last_sign,
            "script": last.get("script"),
            "host": last.get("host"),
            "ranks": last.get("ranks"),
            "starts": len(self.starts),
            "epoch": epoch,
            "epochs": last.get("epochs"),
            "step": step,
            "best": {name: vars(best) for name, best in self.best.items()},
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "resume": self.resume,
        }


def _why(end: Event) -> str:
    """Why a run has ended, and on which rank."""
    why = str(end.get("why", ""))
    if "rank" not in end or why.startswith("rank "):
        return why
    return f"rank {end['rank']}: {why}"


def check_folder(folder: Path, advice: str) -> None:
    """Refuse what is no folder, or cannot be read.

    Raises:
        ConfigError: with `advice` where there is no such folder.
    """
    try:
        os.listdir(folder)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: there is no such folder. {advice}") from None
    except NotADirectoryError:
        raise ConfigError(f"{folder} is not a folder. {advice}") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}.") from None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run. Raises OSError."""
    described = all((folder / name).is_file() for name in _DESCRIBED)
    return described or (folder / NAME).is_file()


def find_runs(folder: Path) -> list[Path]:
    """The folders of runs in `folder`, up to three levels down, or itself.

    Raises:
        ConfigError: there are none, or it cannot be read.
    """
    check_folder(folder, "Give a folder of runs, as in runs/.")
    found = _below(folder, _DEPTH)
    if not found:
        raise ConfigError(
            f"{folder} has no runs, up to {_DEPTH} levels down. A run's folder has a {NAME}; "
            "run.dir names it, and without that it is runs/DATE_TIME."
        )
    return found


def _below(folder: Path, depth: int) -> list[Path]:
    try:
        if is_run(folder):
            return [folder]
        if depth == 0:
            return []
        inner = sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:  # one of many that is not ours to read
        return []
    hidden = [path for path in inner if not path.name.startswith(".") and not path.is_symlink()]
    return [found for path in hidden for found in _below(path, depth - 1)]


def span(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`, `2.1 days`."""
    for limit, unit, length in ((90, "s", 1), (5400, "min", 60), (129600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / length:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} days"
