"""Keep the record of a run, from which `ktrainer runs` and `ktrainer compare` read.

Events used: `on_epoch_begin` and `on_restore` (the start), `on_step_end` and `on_test_batch_end` (a
sign of life), `on_log`, `on_validation_end`, `on_epoch_end` (rows), `on_heal`, `on_train_end` and
`close` (how it ended), `on_times`, `on_slow`.

`ktrainer.runtime.history_file` has the format.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ktrainer.callbacks.reporter import Reporter
from ktrainer.checkpoint.best_metric import metric_direction
from ktrainer.config.redact import redact_text, secrets_in
from ktrainer.distributed import launcher_events, restart_records
from ktrainer.errors import ConfigError
from ktrainer.runtime import history_file
from ktrainer.runtime.code_version import code_version
from ktrainer.runtime.run_folder import library_versions
from ktrainer.state.nested_logs import as_floats
from ktrainer.state.progress import Progress
from ktrainer.state.slowness import Slow
from ktrainer.state.warning_log import on_one_line
from ktrainer.training.run_facts import device_facts, recorded_model_facts

SIGN_SECONDS = 10.0  # the file's time says when the run was last alive
_LEAST_SECONDS = 0.1  # that a run's end adds to the recorded times


class HistoryLog(Reporter):
    """Append what happens in a run to `history.jsonl` in its folder. Needs a trainer.

    A file that cannot be written is warned of, and training continues without those lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None
        self._started = self._ended = False
        self._healed: Progress | None = None  # where training continues with other ranks
        self._known: set[str] = set()  # metrics whose better direction is written
        self._sign = 0.0
        self._failing = False  # the file could not be written, which was said

    # -- the start

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        folder = self.run_dir
        assert folder is not None
        self.path = folder / history_file.NAME
        self._started = self._ended = False
        self._healed, self._known = None, set()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if not self._started:
            self._start(self.progress)

    def on_restore(self, progress: Progress) -> None:
        if self._started:
            self._append("rollback", **_place(progress))
        else:
            self._start(progress)

    def _start(self, progress: Progress) -> None:
        self._started = True
        trainer, state, world = self.trainer, self.train_state, self.world
        facts: dict[str, Any] = {
            "epochs": (self.params or {}).get("epochs"),
            "steps_per_epoch": self.steps_per_epoch,
            "validates": state.validation is not None,
            "script": Path(sys.argv[0]).name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "restart": restart_records.count(),
            "ranks": world.size,
            "replicas": world.replicas,
            "devices": device_facts(),
            "versions": library_versions(),
            "code": code_version(Path(sys.argv[0])),
            "settings": trainer.config.to_dict(redacted=True),
            "data": state.data_facts,
            "checkpoints": str(trainer.checkpoint_dir.absolute()),
            "resume": trainer.words_to_resume(trainer.checkpoint_dir / "CHECKPOINT"),
        }
        if progress.step == 0:  # later, the optimizer's settings are those of the moment
            facts["model"] = recorded_model_facts(self.model)
        self._append("start", **_place(progress), **facts)
        launcher_events.report_history(str(self.path))

    # -- rows

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        self._row("log", self.progress.epoch + 1, step, as_floats(logs))

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._row("validation", self.progress.epoch + 1, step, as_floats(logs))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._row("epoch", epoch + 1, self.progress.step, as_floats(logs))

    def on_times(self, epoch: int, ranks: Sequence[Mapping[str, float]]) -> None:
        if not self._started:  # there was nothing to train
            return
        rows = [{share: round(value, 6) for share, value in rank.items()} for rank in ranks]
        self._append("times", epoch=epoch + 1, step=self.progress.step, ranks=rows)

    def _record_last_times(self) -> None:
        """Record the time since the last row of a run that ends by an error, when other ranks
        cannot be asked for theirs."""
        if (row := self.train_state.times.take())["seconds"] >= _LEAST_SECONDS:
            self.on_times(self.progress.epoch, [row])

    def on_slow(self, slow: Slow) -> None:
        self._append("slow", **asdict(slow))

    def _row(self, event: str, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        if self.train_state.first_batch:
            self._append("data", step=step, data=self.train_state.first_batch)
            self.train_state.first_batch = {}
        if new := metrics.keys() - self._known:
            self._known |= new
            self._append("metrics", better=self._directions(new))
        elapsed = round(self.progress.elapsed, 3)
        self._append(event, epoch=epoch, step=step, elapsed=elapsed, metrics=dict(metrics))

    def _directions(self, names: set[str]) -> dict[str, str]:
        """Whether low or high values are better, of the metrics that tell."""
        found = {}
        for name in sorted(names):
            with suppress(ConfigError):
                found[name] = metric_direction(self.model, name)
        return found

    # -- in between

    def max_updates_per_call(self) -> int | None:
        return None  # a call is shorter than the time between two signs of life

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        self._give_sign()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._give_sign()

    def _give_sign(self) -> None:
        if self.train_state.warnings.has_new:
            self._record_warnings()
        if time.monotonic() - self._sign < SIGN_SECONDS and self._healed is None:
            return
        self._sign = time.monotonic()
        self._tell_ranks()
        if self._started and self.path is not None:
            with suppress(OSError):
                os.utime(self.path)

    def checkpoint_saved(self, step: int, path: Path, facts: Mapping[str, Any]) -> None:
        """Record a checkpoint that is on the disk; called by the thread that has written it."""
        more = {"metric": facts["metric"]} if "metric" in facts else {}
        with suppress(OSError):  # it is complete
            self._write("checkpoint", step=step, path=str(path.absolute()), **more)

    def on_heal(self, progress: Progress) -> None:
        """Note the place; what was lost is known once all of it is done."""
        self._started, self._healed = True, Progress.from_dict(progress.to_dict())

    def _tell_ranks(self) -> None:
        """Record the last change of the ranks."""
        back, self._healed = self._healed, None
        healed = self.train_state.healed
        if back is None:
            return
        last = healed[-1] if healed else None
        self._append(
            "ranks",
            **_place(back),
            ranks=self.world.size,
            lost=list(last.lost) if last else [],
            joined=last.joined if last else None,
            seconds=round(last.seconds, 3) if last else None,
        )

    def _record_warnings(self) -> None:
        """Record the warnings that have come."""
        config, rank = self.trainer.config, self.world.rank
        secrets = (*config._secrets, *secrets_in(config.to_dict()))
        for each in self.train_state.warnings.take():
            self._append(
                "warning",
                step=each.step,
                ranks=each.ranks or [rank],
                kind=each.kind,
                message=on_one_line(redact_text(each.message, secrets)),
                where=each.where,
            )

    # -- the end

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Nothing: what ends training may be an interruption, which `close` knows."""

    def close(self) -> None:
        state = self.train_state
        if self._ended or not state.end:  # else it was not opened
            return
        self._ended = True
        if state.end["reason"] != "finished":
            self._record_last_times()
        secrets = self.trainer.config._secrets
        end = {key: redact_text(str(text), secrets) for key, text in state.end.items()}
        where = {"step": state.progress.step, "epoch": state.progress.epoch}
        with suppress(OSError):  # it must not hide the error that has ended the run
            self._write("end", **end, **(where if self._started else {}))

    def _append(self, event: str, /, **fields: Any) -> None:
        """Append an event, or warn once that it cannot be written."""
        try:
            self._write(event, **fields)
        except OSError as error:
            if not (self._failing or self._ended):  # it must not hide the error that has ended it
                self._failing = True  # first, as a warning may be an error
                warnings.warn(
                    f"the record of the run, {self.path}, cannot be written: "
                    f"{error.strerror or error}. Training continues; `ktrainer runs` and `ktrainer "
                    "compare` will lack what happens until it can be written again.",
                    stacklevel=2,
                )
        else:
            self._failing = False

    def _write(self, event: str, /, **fields: Any) -> None:
        if not self.reports:
            return
        if self.path is None:  # an error before the start
            assert self.run_dir is not None
            self.path = self.run_dir / history_file.NAME
        self._tell_ranks()
        state = self.train_state
        if state.warnings.has_new and event not in ("start", "warning"):
            self._record_warnings()
        where = {"fit": max(1, state.fits)} | ({"inside": state.inside} if state.inside else {})
        self._sign = time.monotonic()
        history_file.append(self.path, event, **where, **fields)


def _place(progress: Progress) -> dict[str, int]:
    """Where training continues: updates made, finished epochs, updates of the present one."""
    return {"step": progress.step, "epoch": progress.epoch, "batch": progress.batch}
