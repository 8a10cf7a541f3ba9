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

from ktrainer.callbacks.reporter import Reporter
from ktrainer.distributed import World
from ktrainer.errors import ConfigError
from ktrainer.runtime.run_folder import of_fit
from ktrainer.state.durations import Duration
from ktrainer.state.nested_logs import as_floats
from ktrainer.state.progress import Progress

LOG_END = "log_end"  # attribute of Keras' CSVLogger: `log_end` when a checkpoint was made

_FIXED = ["event", "epoch", "step"]


class CSVLog(Reporter):
    """Write `metrics.csv`: one row per report, one column per name ever logged.

    The column `event` is `log`, `validation` or `epoch`; `epoch` counts from 1.

    Args:
        path: the file; default: `metrics.csv` in the run's folder, `metrics-2.csv` for a second
            `fit`. Needed without a trainer. With one, each later `fit` that is given the same
            `CSVLog` has a file of its own, too: `own-2.csv`.
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
        self._first_fit: int | None = None  # the number of the first `fit` that it was given to
        self.path = self._given
        self._columns: list[str] = []
        self._kept = False  # the file holds rows of this run

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        state = self.train_state
        path = self.run_path("metrics.csv")
        if self._given is not None:
            first = self._first_fit = self._first_fit or state.fits
            stem = of_fit(self._given.with_suffix(""), state.fits - first + 1, state.inside)
            path = stem.with_name(stem.name + self._given.suffix)
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
def logs_of_keras_kept(callbacks: Iterable[Any]) -> Iterator[None]:
    """Have Keras' CSVLogger keep its file inside the block, in which `on_train_begin` would begin a
    new one before a resume. `cut_logs_of_keras` must follow."""
    loggers = [each for each in callbacks if isinstance(each, keras.callbacks.CSVLogger)]
    # Others, such as a pipe, are not to be read, as Keras does where it appends.
    kept = [each for each in loggers if not each.append and _is_local_file(each.filename)]
    for logger in loggers:
        setattr(logger, LOG_END, None)  # of a resume before
    for logger in kept:
        logger.append = True
    try:
        yield
    finally:
        for logger in kept:
            logger.append = False


def cut_logs_of_keras(callbacks: Iterable[Any], resumed: bool) -> None:
    """Cut the open files of Keras' CSVLogger: after a resume, or a return to a commit, to their
    length there, if it is known; else to nothing, unless they append."""
    for logger in callbacks:
        if not isinstance(logger, keras.callbacks.CSVLogger) or logger.csv_file is None:
            continue
        path, size = log_end(logger) or (None, 0)
        end = getattr(logger, LOG_END, None) if resumed else [path, size if logger.append else 0]
        setattr(logger, LOG_END, None)  # the next commit may be of a rank that writes no file
        match end:
            case [str(known), int(length)] if known == path and 0 <= length <= size:
                os.truncate(known, length)
                if not logger.csv_file.closed:  # open with "a" after a resume, else with "w"
                    logger.csv_file.seek(length)
                logger.writer, logger.append_header = None, length == 0
                logger.keys = _columns(known, logger.sep) if length else None


def _columns(path: str, separator: str) -> list[str]:
    """The names in the head of a CSVLogger's file but the epoch's. Keras would take those of the
    first epoch that it writes, which may have other logs."""
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file, delimiter=separator))[1:]


def log_end(logger: keras.callbacks.CSVLogger) -> list[Any] | None:
    """[path, bytes] of what Keras' CSVLogger has written; None where it writes no local file."""
    if getattr(logger, "csv_file", None) is None or not _is_local_file(logger.filename):
        return None
    if not logger.csv_file.closed:
        logger.csv_file.flush()
    return [os.path.abspath(logger.filename), os.path.getsize(logger.filename)]


def _is_local_file(path: str) -> bool:
    """Whether it can be read; not /dev/stdout either, which may be a file of others too."""
    here = os.path.isfile(path) and not os.path.abspath(path).startswith("/dev/")
    return here and os.access(path, os.R_OK)
