"""Write logs to a CSV file, and keep what Keras' CSVLogger wrote before a resume.

Events used: `on_train_begin`, `on_log` (a row every `logging.every`), `on_validation_end`,
`on_epoch_end` (a row per epoch), `on_restore` (drop rows of steps that will be repeated, and of
incomplete epochs).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
from keras.src.utils.file_utils import File

from ktrainer.callbacks.base import as_floats
from ktrainer.callbacks.reporter import Reporter
from ktrainer.distributed import World
from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration
from ktrainer.state.progress import Progress
from ktrainer.state.train_state import TrainState

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


@contextmanager
def logs_of_keras_kept(callbacks: Iterable[Any], state: TrainState) -> Iterator[None]:
    """Keep the rows of Keras' CSVLogger from before a resume, which happens inside the block after
    `on_train_begin`: there it would begin a new file. Rows of epochs that will be repeated go."""
    loggers = [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
    new = [each for each in loggers if not each.append]
    start = state.progress
    for logger in new:
        logger.append = True
    try:
        yield
    finally:
        for logger in new:
            logger.append = False
    for logger in loggers:
        if state.progress is not start:
            _rewrite_log(logger, state.progress.epoch)
        elif logger in new:
            _rewrite_log(logger, None)


def _rewrite_log(logger: keras.callbacks.CSVLogger, epoch: int | None) -> None:
    """Drop the last rows of a log, of `epoch` and later ones; None: all of it."""
    if logger.csv_file is None:  # of a class that opens it later
        return
    with File(logger.filename, "r") as file:
        lines = file.read().splitlines(keepends=True)
    kept = 0 if epoch is None else len(lines)
    while epoch is not None and kept and _epoch_of(lines[kept - 1], logger.sep) >= epoch:
        kept -= 1
    if kept == len(lines):
        return
    logger.csv_file.close()
    logger.csv_file = File(logger.filename, "w")
    logger.csv_file.write("".join(lines[:kept]))
    logger.csv_file.flush()
    logger.append_header = kept == 0


def _epoch_of(line: str, separator: str) -> int:
    first = line.split(separator)[0].strip()
    return int(first) if first.isdigit() else -1  # the header
