"""Write logs to a CSV file.

Events used: `on_train_begin`, `on_log` (a row every `logging.every`), `on_validation_end`,
`on_epoch_end` (a row per epoch), `on_restore` (drop rows of steps that will be repeated, and of
incomplete epochs).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.callbacks.base import as_floats
from ktrainer.callbacks.reporter import Reporter
from ktrainer.distributed import World
from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration
from ktrainer.state.progress import Progress

_FIXED = ["event", "epoch", "step"]


class CSVLog(Reporter):
    """Write `metrics.csv`: one row per report, one column per name ever logged.

    The column `event` is `log`, `validation` or `epoch`; `epoch` counts from 1.

    Args:
        path: the file; default: `metrics.csv` in the run's folder, `metrics-2.csv` for a second
            `fit`. Needed without a trainer.
        every: see `Reporter`.
        world: the ranks; default: the trainer's, or this process's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        every: str | Duration = "50ba",
        world: World | None = None,
    ) -> None:
        super().__init__(every, world)
        self._given = Path(path) if path is not None else None
        self.path = self._given
        self._columns: list[str] = []
        self._kept = False  # the file holds rows of this run

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        path = self._given or self.run_path("metrics.csv")
        if path is None:
            raise ConfigError("give the path of the file: CSVLog('metrics.csv').", path="path")
        self._kept = self._kept and path == self.path
        self.path = path

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._write("log", self.progress.epoch + 1, step, logs)

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._write("validation", self.progress.epoch + 1, step, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._write("epoch", epoch + 1, self.progress.step, as_floats(logs))

    def on_restore(self, progress: Progress) -> None:
        if not self.reports or self.path is None or not self.path.exists():
            return
        with open(self.path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if _is_done(row, progress)]
        self._columns = list(_FIXED)
        for row in rows:
            self._columns += [name for name in row if name not in self._columns]
        self._rewrite(rows)
        self._kept = True

    def _write(self, event: str, epoch: int, step: int, logs: Mapping[str, float]) -> None:
        if not self.reports:
            return
        assert self.path is not None
        if not self._kept:
            self._columns = list(_FIXED)
            self._rewrite([])
            self._kept = True
        new = [name for name in logs if name not in self._columns]
        if new:
            with open(self.path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        row = {"event": event, "epoch": epoch, "step": step, **logs}
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Write the whole table again, for a new column or fewer rows: rare."""
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


def _is_done(row: Mapping[str, str], progress: Progress) -> bool:
    """Whether the steps or the epoch of a row will not be repeated."""
    if row.get("event") == "epoch":  # an incomplete one will be
        return _number(row, "epoch") <= progress.epoch
    return _number(row, "step") <= progress.step


def _number(row: Mapping[str, str], name: str) -> int:
    try:
        return int(row.get(name) or 0)
    except ValueError:
        return 0
