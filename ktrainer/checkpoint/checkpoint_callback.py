"""Save the whole state of a run periodically, and at the best value of a metric.

Events used: `on_train_begin` (find the folder, clean up after a killed run), `on_step_checkpoint`
and `on_epoch_end` (save when due, or best), `on_validation_end` (logs to judge inside an epoch),
`on_epoch_cut` (keep the state from before the other callbacks count an incomplete epoch), until
`on_epoch_begin`.

All ranks decide together and take part in every save; rank 0 alone writes, or, under a pipeline,
each stage its part. A state whose loss is not finite is not saved.

The values of that moment are kept in host memory, where the next update copies what it changes,
and are written during the following steps, one checkpoint at a time. An error there is raised at
the next save, or at the end, on all ranks.
`on_train_end`, and `close` after an error, wait for the last write.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktrainer.callbacks.base import Callback, as_floats
from ktrainer.checkpoint.background_writer import BackgroundWriter, Saved
from ktrainer.checkpoint.best_metric import BestMetric
from ktrainer.checkpoint.contents.capture_state import history_of
from ktrainer.checkpoint.contents.run_snapshot import Snapshot, take_snapshot
from ktrainer.checkpoint.contents.unsaved_variables import warn_of_unsaved
from ktrainer.checkpoint.format.checkpoint_store import Entry, Store
from ktrainer.config import command_line
from ktrainer.data import data_fingerprint
from ktrainer.distributed import World
from ktrainer.errors import CheckpointError, ConfigError
from ktrainer.state.durations import Duration, Every
from ktrainer.state.nested_logs import losses_are_finite
from ktrainer.state.progress import Progress


class Checkpoint(Callback):
    """Keep the last checkpoints of a run and the best.

    Args:
        directory: their folder; default: the trainer's `checkpoint_dir`. Needed without a trainer.
        every: how often, for example `"1ep"`, `"500ba"` or `"10m"`; None: only when best.
        keep: how many of the last ones to keep, at least 2: one may be damaged.
        best: a name in the logs, for example `"val_loss"`: also save when it is better than
            ever, and keep that one.
        mode: whether `min` or `max` is better; `auto` asks the metric.
        allow_nan: save even when the loss is not finite.
        asynchronous: write in the background; takes host memory for one copy of the state.
        iterators: save what the order of the data depends on: the state of tf.data iterators, with
            their shuffle buffers, of torch's generators, of Python's `random`.
        callbacks: callbacks whose states are saved too; the trainer gives all of the run's.
        world: the ranks; default: the trainer's, or this process's.

    Attributes:
        on_saved: called on rank 0 with the step, the folder and the manifest's facts of each
            checkpoint once it is on the disk, by the thread that has written it.

    Raises:
        ConfigError: no folder, nothing to save for, or a metric of unknown direction.
        SetupError: the folder cannot be written, or another job uses it.
        CheckpointError: on all ranks, when one cannot write.
    """

    time_share = "checkpoint"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        every: str | Duration | None = None,
        keep: int = 2,
        best: str | None = None,
        mode: str = "auto",
        allow_nan: bool = False,
        asynchronous: bool = True,
        iterators: bool = True,
        callbacks: Iterable[Any] = (),
        world: World | None = None,
    ) -> None:
        super().__init__()
        _check_arguments(every, keep, best, mode)
        self._given = Path(directory).expanduser() if directory is not None else None
        self.directory = self._given
        self.every = Every(every)
        self.keep, self.allow_nan = keep, allow_nan
        self._best = BestMetric(best, mode)
        self.asynchronous, self.iterators = asynchronous, iterators
        self.callbacks = list(callbacks)
        self.on_saved: Sequence[Saved] = ()
        self._own_world = world
        self._validated: Mapping[str, float] | None = None  # logs to judge
        # Whether the metric `best` was in logs, or a warning has said that it was not.
        self._best_known: bool | None = None
        self._checked = False  # whether the metric `best` says which value is better
        self._at_cut: Snapshot | None = None  # the state to resume an incomplete epoch from
        self._saver: BackgroundWriter | None = None
        self._run = ""  # name of this run in its checkpoints, the same over restarts
        self._saved: tuple[int, ...] = ()  # moment of the last save
        self._restored = 0, 0  # the step restored from, and the newest checkpoint's serial then

    # -- events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.directory = self._given
        if self.directory is None:
            if self.trainer is None:
                raise ConfigError("give the folder of the checkpoints.", path="checkpoint.dir")
            self.directory = Path(self.trainer.checkpoint_dir)
        self.close()
        self._best.value = self._best.step = self._at_cut = self._validated = None
        self._saved, self._best_known, self._restored = (), None, (0, 0)
        self._checked = False
        if not self.train_state.joining:  # else it comes with the state
            self._run = self.world.broadcast(secrets.token_hex(8), 0, "name of the run")
        self.every.steps_per_epoch = self.steps_per_epoch
        self.every.start(self.progress)
        self._saver = BackgroundWriter(
            self.directory,
            self.model,
            self.world,
            self.asynchronous,
            alone=self.train_state.joining,
            on_saved=self.on_saved,
        )

    @property
    def best(self) -> str | None:
        """The metric that decides, in the logs; None: none does."""
        return self._best.name

    @property
    def mode(self) -> str:
        """Whether `min` or `max` is better; `auto` asks the metric."""
        return self._best.mode

    @property
    def best_value(self) -> float | None:
        """The best value of the metric `best` so far."""
        return self._best.value

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._validated = logs if self.best is not None else None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._at_cut = None  # training continues, where the stop was called off

    def max_updates_per_call(self) -> int | None:
        return self.every.updates_until_due(self.progress)

    def on_step_checkpoint(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self._checked:
            self._best.check(self.model)
            self._checked = True
        validated, self._validated = self._validated, None
        due = self._due(epoch_end=False)
        if validated is not None and self._save_if_better(
            validated, missing_is_fine=not self._best_is_of_validation
        ):
            return
        if due:
            self.save(logs)

    def on_epoch_cut(self, epoch: int) -> None:
        self._at_cut = self._snapshot()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._at_cut = None
        try:
            if self._saver is not None:
                self._saver.close_together()
        finally:
            self.close()
        self._warn_if_never_validated()

    def _warn_if_never_validated(self) -> None:
        known = self._best_known is not False or self.best_value is not None
        if known or self.train_state.end or not self.world.is_root:
            return
        warnings.warn(
            f"checkpoint.best={self.best!r} was in no logs, so no best checkpoint was saved: "
            "training has ended before the first validation; see trainer.validate_every",
            stacklevel=3,
        )

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        due = self._due(epoch_end=True)
        progress = self._progress_at_epoch_end(epoch)
        at_end: dict[str, Any] = {
            "progress": progress,
            "history": self._history(epoch, logs, progress),
        }
        if self.best is not None and self._save_if_better(
            logs or {}, missing_is_fine=self._is_of_other_epochs(logs or {}), **at_end
        ):
            return
        if due:
            self.save(logs, **at_end)

    # -- decisions

    def _due(self, epoch_end: bool) -> bool:
        due = self.every.due(self.progress, epoch_end=epoch_end)
        return self._agreed(due) if self.every.needs_agreement else due

    def _agreed(self, flag: bool) -> bool:
        return bool(self.world.broadcast(bool(flag), 0, "decision to checkpoint"))

    def _save_if_better(
        self,
        logs: Mapping[str, Any],
        missing_is_fine: bool = False,
        **at_end: Any,
    ) -> bool:
        assert self.best is not None
        value = as_floats(logs).get(self.best)
        self._best_known = self._best_known or value is not None or not missing_is_fine
        if value is None:
            if not missing_is_fine:
                warnings.warn(
                    f"checkpoint.best={self.best!r} is not in the logs, which have: "
                    f"{', '.join(sorted(logs))}",
                    stacklevel=3,
                )
            return False
        if not self._agreed(self._best.improves(self.model, value)):
            return False
        before = self._best.value, self._best.step
        self._best.value, self._best.step = value, self.progress.step  # the state has them too
        saved = self.save(logs, **at_end)
        if not saved:
            self._best.value, self._best.step = before
        return saved

    def _is_of_other_epochs(self, logs: Mapping[str, Any]) -> bool:
        """Whether the metric `best` is one of validation, and this epoch is not validated."""
        validated = any(name.startswith("val_") for name in logs)
        has_data = self.train_state.validation is not None
        return self._best_is_of_validation and not validated and has_data

    @property
    def _best_is_of_validation(self) -> bool:
        return self.best is not None and self.best.startswith("val_")

    # -- saving

    def save(
        self,
        logs: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        history: dict[str, Any] | None = None,
    ) -> bool:
        """Save now, on all ranks together; return whether it was saved.

        Args:
            logs: the present logs; a loss in them that is not finite prevents saving.
            progress: the position to resume from; default: the present.
            history: History so far; default: the model's.

        Raises:
            CheckpointError: on all ranks: this one, or the previous one, cannot be written.
        """
        if self.trainer is not None and self.train_state.update_invalid:
            return False  # on all ranks; reported already
        bad = not self.allow_nan and not losses_are_finite(logs)
        if self.world.any(bad, "loss before a checkpoint"):
            if self.world.is_root:
                warnings.warn("the loss is not finite: no checkpoint was saved", stacklevel=2)
            return False
        assert self._saver is not None
        self._saver.settle()  # before the values of another moment are kept
        snapshot = self._at_cut or self._snapshot(progress, history)
        snapshot = replace(snapshot, facts={**snapshot.facts, **self.run_facts(snapshot.step)})
        try:
            self._saver.save(snapshot, self._pruning())
        except CheckpointError:
            self.close()
            raise
        self._saved = (progress or self.progress).moment
        return True

    def run_facts(self, step: int) -> dict[str, Any]:
        """The manifest's entries about the run: its name, the seed of its script, facts of its call
        of `fit`, and the best value if it is that of `step`, saved for the first time or again."""
        call = {} if self.trainer is None else {"call": self.train_state.call_facts}
        seed = command_line.launcher_seed
        seeded = {} if seed is None else {"script_seed": seed}
        return {"run": self._run, **seeded, **call, **self._best.facts(self.model, step)}

    def save_in_time(self, seconds: float) -> None:
        """Save, unless this state is saved already, or a save is likely to take longer than
        `seconds`. All ranks together."""
        if self._saver is None or self.progress.step == 0 or self.progress.moment == self._saved:
            return
        if self._agreed(self._saver.seconds_to_save() < seconds):
            self._saver.niceness = 0  # no more steps are made
            self.save()

    def latest(self) -> Entry | None:
        """The newest checkpoint of this run in the folder; on rank 0, with no write in progress."""
        if self.directory is None:
            return None
        entries = Store(self.directory).entries()
        return next((e for e in entries if e.problem is None and self.is_in_history(e)), None)

    def is_in_history(self, entry: Entry) -> bool:
        """Return whether this run has restored a checkpoint, or saved it since: where it resumed by
        a path, its folder has older ones of later steps."""
        step, serial = self._restored
        return entry.run == self._run and (entry.serial > serial or entry.step == step)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; all ranks together.

        Raises:
            CheckpointError: on all ranks, if it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    def _snapshot(
        self, progress: Progress | None = None, history: dict[str, Any] | None = None
    ) -> Snapshot:
        callbacks = self.callbacks or [self]
        progress, more = progress or self.progress, dict[str, Any]()
        if self.trainer is not None:
            state = self.train_state
            state.program.finish()  # updates that still run (parameter servers)
            if self.world.is_root:
                warn_of_unsaved(self.model, state.program.graphs, callbacks)
            place = data_fingerprint(state.feed, self.trainer.config)
            more = {"place": place, "counted": state.counted}
            more |= {"feed": state.feed} if self.iterators else {}
        return take_snapshot(self.model, progress, self.world, callbacks, history, **more)

    def _pruning(self) -> Callable[[Store], None]:
        """The function that removes older checkpoints after a new one is written."""
        step = self._best.step  # of now: this runs while training continues
        return lambda store: store.prune(self.keep, step)

    def _progress_at_epoch_end(self, epoch: int) -> Progress:
        """The position to resume from: the next epoch, unless a stop cut this one short."""
        progress = Progress.from_dict(self.progress.to_dict())
        if progress.epoch == epoch and self.train_state.epoch_complete:
            progress.finish_epoch()
        return progress

    def _history(
        self, epoch: int, logs: Mapping[str, Any] | None, progress: Progress
    ) -> dict[str, Any]:
        """History with this epoch, which Keras' own callback, the last in line, adds later."""
        history = history_of(self.model)
        if epoch not in history["epoch"] and progress.epoch > epoch:
            history["epoch"].append(epoch)
            for key, value in (logs or {}).items():
                history["history"].setdefault(key, []).append(value)
        return history

    def state_dict(self) -> dict[str, Any]:
        return {**self._best.state_dict(), "run": self._run, "restored": [*self._restored]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best.load_state_dict(state)
        self._run = state.get("run", self._run)
        with suppress(TypeError, ValueError):  # forged; a resume sets it anew
            step, serial = state.get("restored", self._restored)
            self._restored = int(step), int(serial)

    def on_restore(self, progress: Progress) -> None:
        self.every.start(progress)
        newest = 0
        if self.world.is_root and self.directory is not None:
            newest = max((entry.serial for entry in Store(self.directory).entries()), default=0)
        # On all ranks: another one may become the first.
        newest = self.world.broadcast(newest, 0, "newest checkpoint")
        self._restored = progress.step, newest

    def on_heal(self, progress: Progress) -> None:
        self.every.heal(progress)
        self._validated, self._saved = None, ()  # a rank that joins knows of no save
        if self._saver is not None:
            self._saver.ranks_changed()


def _check_arguments(every: Any, keep: int, best: str | None, mode: str) -> None:
    if every is None and best is None:
        raise ConfigError("a checkpoint callback needs `every` or `best`.", path="checkpoint.every")
    if keep < 2:
        raise ConfigError(
            "keep at least the last two checkpoints: one may be damaged.",
            path="checkpoint.keep",
            value=keep,
        )
    if mode not in ("auto", "min", "max"):
        raise ConfigError(
            f"{mode!r} is not auto, min or max.",
            path="checkpoint.mode",
            value=mode,
            known=("auto", "min", "max"),
        )
