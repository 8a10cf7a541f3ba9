"""A trial of a sweep as a run: a process of `ktrainer run`, and what came of it."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktrainer.errors import ConfigError, SetupError
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.folder_lock import NAME as LOCK
from ktrainer.runtime.folder_lock import is_held
from ktrainer.runtime.history_file import place
from ktrainer.tuning.sweep_trial import PRUNED, metric_of

OUTPUT = "output.txt"
_POLL_SECONDS = 0.05
_FREE_SECONDS = 60.0  # for the ranks of a killed run to end
_SIGNAL = 128  # plus a signal's number: a shell's exit code


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        state: finished, pruned or failed.
        value: the best of the metric.
        metric: its name.
        epochs: that were trained.
        why: it has failed.
    """

    state: str
    value: float | None = None
    metric: str | None = None
    epochs: int | None = None
    why: str = ""


def run_trial(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], signals: list[int]
) -> int:
    """Run `ktrainer run` with its output in a file of `folder`; return its exit code, that of a
    shell if it was killed.

    Args:
        words: of `ktrainer run`.
        signals: to this process, which grows; they are forwarded.
    """
    _wait_until_free(folder, signals)
    if signals:
        return _SIGNAL + signals[0]
    command = [sys.executable, "-m", "ktrainer.cli.main", "run", *words]
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / OUTPUT, "ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through this process alone
            preexec_fn=end_with_parent,
        )
        forwarded = 0
        try:
            while process.poll() is None:
                time.sleep(_POLL_SECONDS)
                for number in signals[forwarded:]:
                    forwarded += 1
                    process.send_signal(number)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    code = process.returncode
    return _SIGNAL - code if code < 0 else code


def _wait_until_free(folder: Path, signals: list[int]) -> None:
    """Wait for the ranks of a killed sweep to end, or for a signal.

    Raises:
        SetupError: they do not.
    """
    until = time.monotonic() + _FREE_SECONDS
    while folder.exists() and is_held(folder) and not signals:
        if time.monotonic() > until:
            raise SetupError(
                f"{folder} is in use by an earlier start of this trial, which does not end. End "
                f"its processes ({folder / LOCK} names one); the same command then continues."
            )
        time.sleep(_POLL_SECONDS)


def trial_folder(number: int) -> str:
    """The name of the folder of a trial's run."""
    return f"trial-{number:04d}"


def outcome(folder: Path, code: int, metric: str | None, mode: str) -> Outcome:
    """The outcome of the run in `folder` that has ended with an exit code."""
    try:
        record = RunRecord(folder, logs=False)
    except ConfigError:
        record = None
    if record is None or not record.starts:
        no_fit = "it has trained nothing by a Trainer or Model.fit, so there is no record of it"
        return Outcome("failed", why=_failure(folder, code) if code else no_fit)
    epochs = record.progress[0]
    state, why = record.state
    if code != 0:
        said = why if state == "failed" and why else _failure(folder, code)
        return Outcome("failed", epochs=epochs, why=said)
    if state == "failed" or record.end is None:  # though the script has ended as if it had not
        return Outcome("failed", epochs=epochs, why=why or f"its run is {state}")
    rows = _rows(record)
    name = metric_of(metric, _has_validation_loss(record, rows))
    for each, last in _last(rows, name).items():
        if not math.isfinite(last):
            return Outcome("failed", metric=name, epochs=epochs, why=f"{each} is {last}")
    values = [row[name] for row in rows if name in row]
    if not values:
        return Outcome("failed", why=_without(name, metric), epochs=epochs)
    best = (min if mode == "min" else max)(value for value in values if math.isfinite(value))
    pruned = why == f"stopped because {PRUNED}"
    return Outcome("pruned" if pruned else "finished", best, name, epochs)


Rows = Sequence[Mapping[str, float]]


def _rows(record: RunRecord) -> Rows:
    """The metrics of all validations and epochs of the script's last `fit`."""
    kinds = ("validation", "epoch")
    rows = [r for r in record.rows if r["event"] in kinds and place(r) == record.last_fit]
    return [{name: float(value) for name, value in row["metrics"].items()} for row in rows]


def _has_validation_loss(record: RunRecord, rows: Rows) -> bool:
    """Whether it has a validation loss, or would have: it ended before its first validation."""
    names = {name for row in rows for name in row}
    has_validated = any(name.startswith("val_") for name in names)
    return "val_loss" in names or (not has_validated and bool(record.starts[-1].get("validates")))


def _without(name: str, metric: str | None) -> str:
    if metric is None and name == "val_loss":
        return (
            "it ended before its first validation, and trials are compared by val_loss: validate "
            "sooner (trainer.validate_every), or give --metric loss"
        )
    return f"its record has no {name}"


def _last(rows: Rows, metric: str) -> dict[str, float]:
    """The last loss, and the last value of the metric."""
    last: dict[str, float] = {}
    for row in rows:
        last |= row
    return {name: last[name] for name in ("loss", metric) if name in last}


def _failure(folder: Path, code: int) -> str:
    """The last line of a run's output."""
    lines = [line.strip() for line in output_end(folder).splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"exit status {code}"


def output_end(folder: Path, most: int = 4000) -> str:
    """The end of a run's output."""
    with contextlib.suppress(OSError), open(folder / OUTPUT, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read().decode(errors="replace")
    return ""
