"""When: epochs, updates, validation, logging and stopping, the same on every rank.

    on_train_begin, resume
    until epochs, max_steps, max_time or a callback end it:
        on_epoch_begin
            for each update:
                on_train_batch_begin, on_step_begin
                program.train(shares)
                on_step_end, on_train_batch_end (between the two: back to the last checkpoint, if
                    a callback asked for it)
                every logging.every: logs of all ranks, on_log
                every trainer.validate_every, inside the epoch: validate, on_validation_end
                stop if any rank wants to
        on_epoch_cut, if a stop left some updates
        validation at the epoch's end
        on_epoch_end
    on_train_end

An epoch that a stop cuts short is validated and reported like any other, as in Keras, but does
not count as finished: a checkpoint of it goes on inside it, with the state of before its
`on_epoch_end`, which will come once more.

Whatever could differ between ranks (a stop, the clock, running out of data) is decided by all of
them together; no rank leaves the loop alone.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.callbacks.base import emit
from ktrainer.callbacks.metrics import global_results
from ktrainer.durations import Duration, Every
from ktrainer.errors import DataError
from ktrainer.evaluation import evaluate
from ktrainer.interruption import Asked, Interruption, leave
from ktrainer.rollback import roll_back
from ktrainer.steps import Steps

if TYPE_CHECKING:
    from ktrainer.feed import Feed, Share
    from ktrainer.trainer import Trainer


@dataclass(frozen=True)
class Schedule:
    """When things happen.

    Attributes:
        epochs: passes over the data, in all.
        max_steps: updates in all; None for no limit.
        max_seconds: seconds of training in all, over restarts; None for no limit.
        validate: how often to validate; None for never.
        log: how often to gather the logs of all ranks.
        accumulate: shares an update.
        steps_per_call: updates in one compiled call.
    """

    epochs: int = 1
    max_steps: int | None = None
    max_seconds: float | None = None
    validate: Duration | None = None
    log: Duration | None = None
    accumulate: int = 1
    steps_per_call: int = 1


class Loop:
    """One run of `fit`.

    Args:
        trainer: whose progress, timers and world the loop keeps.
        program: the model's compiled steps.
        callbacks: Keras' list of all callbacks.
        feed: this rank's shares of the training data.
        validation: those of the validation data, or None.
        schedule: when things happen.
        interruption: what asks the process to end.
    """

    def __init__(
        self,
        trainer: Trainer,
        program: Steps,
        callbacks: keras.callbacks.CallbackList,
        feed: Feed,
        validation: Feed | None,
        schedule: Schedule,
        interruption: Interruption,
    ) -> None:
        self.trainer, self.program, self.callbacks = trainer, program, callbacks
        self.feed, self.validation, self.schedule = feed, validation, schedule
        self.interruption = interruption
        self.model = program.model
        self.world = trainer.world
        known = trainer.steps_per_epoch
        self._validate = Every(schedule.validate if validation is not None else None, known)
        self._log = Every(schedule.log, known)
        self._examples = 0  # this rank's, in the epoch so far
        self._validated: tuple[int, dict[str, Any]] = (-1, {})  # step and logs of the last one
        self._started = 0.0
        self._late = False  # `max_time` has passed, on any rank
        self._waited = trainer.communication_seconds or 0.0  # in calls of `fit` before this one

    def run(self) -> Any:
        """Train to the end; returns Keras' History."""
        self.model.stop_training = False
        self.callbacks.on_train_begin()
        self.trainer.resume()
        if self.model.stop_training and self.world.is_root:
            warnings.warn(
                "training had been stopped when the checkpoint was made, so there is nothing to "
                "do; checkpoint.resume=never starts afresh",
                stacklevel=2,
            )
        self._start_clock()
        self._skip_to_initial_epoch()
        self._check_time()
        logs: dict[str, Any] | None = None
        try:
            while not self._finished():
                logs = self._epoch()
        except Asked as asked:
            leave(self.trainer, self.callbacks, asked)
        # As Keras: optimizers of a user's own `train_step` do not own all trainable weights.
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.finalize_variable_values(self.model.trainable_weights)
        self.callbacks.on_train_end(logs=logs)
        return self.model.history

    def _start_clock(self) -> None:
        """Count time and intervals from where a restore left them."""
        self._started = time.monotonic() - self.trainer.progress.elapsed
        for every in (self._validate, self._log):
            every.start(self.trainer.progress)

    def _skip_to_initial_epoch(self) -> None:
        """Go on where Keras' BackupAndRestore, which runs on rank 0, says."""
        epoch = self.world.broadcast(int(self.model._initial_epoch or 0), what="initial epoch")
        progress = self.trainer.progress
        if epoch > progress.epoch:
            progress.epoch = epoch
            # The learning rate and `max_steps` go by the step.
            progress.step = epoch * (self.trainer.steps_per_epoch or 0)

    def _check_time(self) -> None:
        """`max_time` holds over restarts: it may have been used up before this one."""
        if self.schedule.max_seconds is None:
            return
        self._agree_to_stop()
        if self._late and self.world.is_root:
            warnings.warn(
                f"training had taken {self.trainer.progress.elapsed:.0f} s when the checkpoint was "
                "made, which is all of trainer.max_time, so there is nothing to do",
                stacklevel=3,
            )

    def _finished(self) -> bool:
        return (
            self.model.stop_training
            or self._late
            or self.trainer.progress.epoch >= self.schedule.epochs
            or self._steps_left() == 0
            or self.feed.exhausted
        )

    def _steps_left(self) -> int | None:
        if self.schedule.max_steps is None:
            return None
        return max(0, self.schedule.max_steps - self.trainer.progress.step)

    def _epoch(self) -> dict[str, Any]:
        progress, epoch = self.trainer.progress, self.trainer.progress.epoch
        first = progress.batch
        if first == 0:
            self.model.reset_metrics()
        self._examples = 0
        self.callbacks.on_epoch_begin(epoch)
        logs, cut = self._batches(epoch, skip=first * self.schedule.accumulate)
        if progress.batch == 0:
            if self.feed.exhausted and epoch > 0:
                self.model.stop_training = True  # a generator that has nothing more to give
            else:
                raise DataError("the training data has no batches")
        self.trainer.epoch_complete = not cut
        if cut:
            emit(self.callbacks.callbacks, "on_epoch_cut", epoch)
        epoch_logs = self._global_logs(logs)
        if self._due(self._validate, epoch_end=True):
            epoch_logs |= self._validation_logs(keep=cut)
        elif self._validated[0] == progress.step:  # after the epoch's last update
            epoch_logs |= self._validated[1]
        self.callbacks.on_epoch_end(epoch, epoch_logs)
        if not cut:
            progress.finish_epoch()
        self._agree_to_stop("stop after epoch")
        return epoch_logs

    def _batches(self, epoch: int, skip: int) -> tuple[Any, bool]:
        """Train on an epoch's shares but the first `skip`; returns the last logs, and whether
        a stop left some of the shares."""
        logs: Any = {}
        shares = self.feed.epoch(epoch, skip=skip)
        with closing(shares):  # type: ignore[type-var]
            if self.trainer.progress.validation_due:
                self._validate_inside_epoch()
                if self._agree_to_stop():
                    return logs, self._is_cut()
            for updates in self._updates(shares):
                logs = self._train(updates)
                if self._agree_to_stop():
                    return logs, self._is_cut()
        return logs, False

    def _is_cut(self) -> bool:
        known = self.trainer.steps_per_epoch
        return known is None or self.trainer.progress.batch < known

    def _updates(self, shares: Iterator[Share]) -> Iterator[list[list[Share]]]:
        """Lists of updates that go into one call, each a list of shares."""
        timers = self.trainer.timers
        while True:
            left = self._steps_left()
            calls = self.schedule.steps_per_call
            calls = calls if left is None else min(calls, left)
            start = time.perf_counter()
            take = partial(self._take_updates, shares, calls)
            updates = self.interruption.awaiting(take, alone=self.world.size == 1)
            timers["data"] += time.perf_counter() - start
            if not updates:
                return
            if self.feed.spec is not None:
                self.program.build(self.feed.spec)  # wider, should a new shape have appeared
            yield updates

    def _take_updates(self, shares: Iterator[Share], count: int) -> list[list[Share]]:
        of = self.schedule.accumulate
        return [update for _ in range(count) if (update := list(islice(shares, of)))]

    def _train(self, updates: list[list[Share]]) -> Any:
        """One call of the program, with its events and what is due after it."""
        progress, ours = self.trainer.progress, self.callbacks.callbacks
        self.world.step = progress.step + 1
        self.callbacks.on_train_batch_begin(progress.batch)
        emit(ours, "on_step_begin", progress.step)
        start = time.perf_counter()
        if len(updates) == 1:
            logs = self.program.train(updates[0])
        else:
            logs = self.program.train_many([shares[0] for shares in updates])
        self.trainer.timers["step"] += time.perf_counter() - start
        for shares in updates:
            progress.advance(sum(share.global_examples for share in shares))
            if self.program.counts_metrics:
                self._examples += sum(share.examples for share in shares)
        progress.elapsed = time.monotonic() - self._started
        if (waited := self.trainer.communication_seconds) is not None:
            self.trainer.timers["communication"] = waited - self._waited
        emit(ours, "on_step_end", progress.step, logs)
        if self.trainer.rollback is not None:
            roll_back(self.trainer, self.callbacks)
            self._examples = 0  # as the metrics, which begin anew
            for every in (self._validate, self._log):
                every.start(progress)
        self.callbacks.on_train_batch_end(progress.batch - 1, logs)
        if self._due(self._log):
            emit(ours, "on_log", progress.step, self._global_logs(logs))
        if self._due(self._validate):
            self._validate_inside_epoch()
        return logs

    def _due(self, every: Every, epoch_end: bool = False) -> bool:
        due = every.due(self.trainer.progress, epoch_end=epoch_end)
        if every.needs_agreement:  # clocks differ: rank 0's decides
            due = bool(self.world.broadcast(due, what="is it time"))
        return due

    def _agree_to_stop(self, what: str = "stop") -> bool:
        limit = self.schedule.max_seconds
        late = limit is not None and self.trainer.progress.elapsed >= limit
        # Not a stop that a checkpoint should remember: a later run may have more time.
        flags = (bool(self.model.stop_training), late)
        stopped, self._late = self.interruption.agree(self.world, flags, what)
        self.model.stop_training = stopped
        return stopped or self._late or self._steps_left() == 0

    def _global_logs(self, logs: Any) -> dict[str, Any]:
        logs = self.program.finish() or logs
        return global_results(self.model.metrics, self.world, logs=logs, examples=self._examples)

    def _validate_inside_epoch(self) -> None:
        self.trainer.progress.validation_due = True  # should it be interrupted
        logs = self._validation_logs(keep=True)
        self.trainer.progress.validation_due = False
        self._validated = self.trainer.progress.step, logs
        emit(self.callbacks.callbacks, "on_validation_end", self.trainer.progress.step, logs)

    def _validation_logs(self, keep: bool) -> dict[str, Any]:
        """Validate; to `keep` is to put the metrics of the epoch so far back."""
        assert self.validation is not None
        self.program.finish()
        kept = [(v, v.numpy()) for v in self.model.metrics_variables]

        def agree(stop: bool) -> bool:
            return self.interruption.agree(self.world, (stop,), "stop evaluating")[0]

        try:
            logs = evaluate(self.program, self.validation, self.callbacks, self.world, agree)
        except Asked:
            keep = True
            raise
        finally:
            for variable, value in kept if keep else ():
                variable.assign(value)
        return {f"val_{name}": value for name, value in logs.items()}
