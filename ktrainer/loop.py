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
                on_step_checkpoint
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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from ktrainer.beginning import NO_BATCHES, skip_to_initial_epoch, warn_if_late, warn_if_stopped
from ktrainer.callbacks.base import emit
from ktrainer.counted import Counted
from ktrainer.durations import Every
from ktrainer.errors import DataError
from ktrainer.evaluation import common_logs, logs_so_far, validate
from ktrainer.interruption import Asked, Interruption, leave
from ktrainer.progress import Phase, Progress
from ktrainer.rollback import roll_back
from ktrainer.schedule import Schedule
from ktrainer.step_logs import flatten_paths, unflatten_paths
from ktrainer.steps import Steps

if TYPE_CHECKING:
    from ktrainer.feed import Feed, Share
    from ktrainer.healing import JustInTime, Survival
    from ktrainer.trainer import Trainer


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

    Attributes:
        survival: what goes on after the death of ranks, or saves what is left, if anything does.
        late: `max_time` has passed, on any rank.
    """

    survival: Survival | JustInTime | None = None

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
        self.late = False
        self._started = 0.0
        self._owed = False  # an epoch's end, though there is nothing left to train on
        self._untold: Any = None  # logs of an update that callbacks have not heard of
        self._waited = trainer.communication_seconds or 0.0  # in calls of `fit` before this one

    def run(self) -> Any:
        """Train to the end; returns Keras' History."""
        self.begin()
        return self.go_on()

    def begin(self) -> None:
        """Everything before the first update."""
        self.model.stop_training = False
        self.callbacks.on_train_begin()
        self.trainer._resume()
        warn_if_stopped(self.model, self.world)
        self._start_clock()
        skip_to_initial_epoch(self.trainer, self.schedule.initial_epoch)
        progress = self.trainer.progress
        ended = self.steps_left == 0 or progress.batch == self.trainer.steps_per_epoch
        self._owed = progress.validation_due or (ended and progress.batch > 0)
        if self.schedule.max_seconds is not None:  # over restarts: it may have been used up
            try:
                self._agree_to_stop()
            except Asked as asked:
                leave(self.trainer, self.callbacks, asked)
            warn_if_late(self.late, self.trainer)

    def go_on(self) -> Any:
        """Train from where the run stands to the end; returns Keras' History."""
        logs: dict[str, Any] | None = None
        try:
            while self._owed or not self._finished():
                self._owed = False
                logs = self._epoch()
        except Asked as asked:
            leave(self.trainer, self.callbacks, asked)
        self.program.finalize_weights()
        self.callbacks.on_train_end(logs=logs)
        return self.model.history

    def take_up(
        self,
        feed: Feed,
        validation: Feed | None,
        *,
        late: bool,
        phase: Phase,
        logs: Any,
        told: tuple[int, int],
    ) -> Progress:
        """Stand where `trainer.progress` says; returns up to where callbacks have heard of it.

        Args:
            feed, validation, late: as the attributes.
            phase, logs: of the last update.
            told: step and batch up to which callbacks have heard.
        """
        self.feed, self.validation = feed, validation
        self.late = late
        known = unflatten_paths(
            logs, {p: value for p, value in flatten_paths(logs).items() if value is not None}
        )
        self._untold = known if phase == Phase.UPDATED else None
        self.trainer.counted.logs = logs
        progress = self.trainer.progress
        # What follows an update, or the last one of an epoch, is due even if nothing else is.
        self._owed = phase == Phase.UPDATED or (phase == Phase.TOLD and progress.batch > 0)
        self._started = time.monotonic() - progress.elapsed
        before = replace(progress, step=told[0], batch=told[1])
        for every in (self._validate, self._log):
            every.heal(before)
        return before

    def _start_clock(self) -> None:
        """Count time and intervals from where a restore left them."""
        self._started = time.monotonic() - self.trainer.progress.elapsed
        for every in (self._validate, self._log):
            every.start(self.trainer.progress)

    def _finished(self) -> bool:
        return (
            self.model.stop_training
            or self.late
            or self.trainer.progress.epoch >= self.schedule.epochs
            or self.steps_left == 0
            or self.feed.exhausted
        )

    @property
    def steps_left(self) -> int | None:
        """Updates until `trainer.max_steps`; None without that limit."""
        if self.schedule.max_steps is None:
            return None
        return max(0, self.schedule.max_steps - self.trainer.progress.step)

    def _epoch(self) -> dict[str, Any]:
        progress, epoch = self.trainer.progress, self.trainer.progress.epoch
        first = progress.batch
        if first == 0:
            self.model.reset_metrics()
            self.trainer.counted = Counted()
        self.callbacks.on_epoch_begin(epoch)
        cut = self._batches(epoch, skip=first * self.schedule.accumulate)
        if progress.batch == 0:
            if self.feed.exhausted and epoch > 0:
                self.model.stop_training = True  # a generator that has nothing more to give
            else:
                raise DataError(NO_BATCHES)
        self.trainer.epoch_complete = not cut
        if cut:
            emit(self.callbacks.callbacks, "on_epoch_cut", epoch)
        epoch_logs = logs_so_far(self.trainer, self.program)
        if self._due(self._validate, epoch_end=True) and self.schedule.validates_after(epoch):
            epoch_logs |= self._validation_logs(keep=cut)
        else:
            epoch_logs |= progress.validated  # after the epoch's last update
        self.callbacks.on_epoch_end(epoch, epoch_logs)
        if not cut:
            progress.finish_epoch()
        self._agree_to_stop("stop after epoch")
        if self.survival is not None:
            self.survival.mark(Phase.EPOCH_ENDED)
        return epoch_logs

    def _batches(self, epoch: int, skip: int) -> bool:
        """Train on an epoch's shares but the first `skip`; whether a stop left some of them."""
        if self._untold is not None:
            logs, self._untold = self._untold, None
            if self._tell(logs):
                return self._is_cut()
        progress = self.trainer.progress
        if progress.validation_due:
            self._validate_inside_epoch()
            emit(
                self.callbacks.callbacks,
                "on_step_checkpoint",
                progress.step,
                self.trainer.counted.logs,
            )
            if self._agree_to_stop():
                return self._is_cut()
        if self._finished():  # and only the epoch's end was owed
            return self._is_cut()
        shares = self.feed.epoch(epoch, skip=skip)
        with closing(shares):  # type: ignore[type-var]
            for updates in self._updates(shares):
                if self._tell(self._train(updates)):
                    return self._is_cut()
        return False

    def _is_cut(self) -> bool:
        """Whether a stop now leaves some of the epoch."""
        known = self.trainer.steps_per_epoch
        return known is None or self.trainer.progress.batch < known

    def _updates(self, shares: Iterator[Share]) -> Iterator[list[list[Share]]]:
        """Lists of updates that go into one call, each a list of shares."""
        timers = self.trainer.timers
        while True:
            start = time.perf_counter()
            take = partial(self.schedule.take, shares, self.steps_left)
            updates = self.interruption.awaiting(take, alone=self.world.size == 1)
            timers["data"] += time.perf_counter() - start
            if not updates:
                return
            if self.feed.spec is not None:
                self.program.build(self.feed.spec)  # wider, should a new shape have appeared
            yield updates

    def _train(self, updates: list[list[Share]]) -> Any:
        """One call of the program."""
        progress, counted = self.trainer.progress, self.trainer.counted
        self.world.step = progress.step + 1
        self.callbacks.on_train_batch_begin(progress.batch)
        emit(self.callbacks.callbacks, "on_step_begin", progress.step)
        start = time.perf_counter()
        if self.survival is not None:
            self.survival.step_begins()
        if len(updates) == 1:
            logs = self.program.train(updates[0])
        else:
            logs = self.program.train_many([shares[0] for shares in updates])
        self.trainer.timers["step"] += time.perf_counter() - start
        for shares in updates:
            progress.advance(sum(share.global_examples for share in shares))
            if self.program.counts_metrics:
                counted.examples += sum(share.examples for share in shares)
                counted.last = shares[-1].examples
        counted.logs = logs
        progress.elapsed = time.monotonic() - self._started
        if (waited := self.trainer.communication_seconds) is not None:
            self.trainer.timers["communication"] = waited - self._waited
        if self.survival is not None:
            self.survival.mark(Phase.UPDATED, logs)
        return logs

    def _tell(self, logs: Any) -> bool:
        """What follows an update: its events, what is due; whether to stop, on all ranks."""
        progress, ours = self.trainer.progress, self.callbacks.callbacks
        emit(ours, "on_step_end", progress.step, logs)
        if self.trainer.rollback is not None:
            roll_back(self.trainer, self.callbacks)
            self.trainer.counted.examples = 0  # as the metrics, which begin anew
            for every in (self._validate, self._log):
                every.start(progress)
        batch_logs = logs
        if common_logs(self.trainer):
            batch_logs = logs_so_far(self.trainer, self.program)
        self.callbacks.on_train_batch_end(progress.batch - 1, batch_logs)
        if self._due(self._log):
            emit(ours, "on_log", progress.step, logs_so_far(self.trainer, self.program))
        if self._due(self._validate):
            self._validate_inside_epoch()
        emit(ours, "on_step_checkpoint", progress.step, logs)
        stop = self._agree_to_stop()
        if self.survival is not None:
            self.survival.mark(Phase.TOLD)
        return stop

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
        highest = self._highest if self.survival is None else self.survival.highest
        stopped, self.late = self.interruption.agree(highest, flags, what)
        self.model.stop_training = stopped
        return stopped or self.late or self.steps_left == 0

    def _highest(self, values: np.ndarray, what: str) -> np.ndarray:
        return self.world.oob_allreduce(values, "max", what)

    def _validate_inside_epoch(self) -> None:
        progress = self.trainer.progress
        progress.validation_due = True  # should it be interrupted
        progress.validated = self._validation_logs(keep=True)
        progress.validation_due = False
        logs = dict(progress.validated)  # theirs, as that is what checkpoints keep
        emit(self.callbacks.callbacks, "on_validation_end", progress.step, logs)

    def _validation_logs(self, keep: bool) -> dict[str, Any]:
        """Validate; to `keep` is to put the metrics of the epoch so far back."""
        assert self.validation is not None
        self.program.finish()

        def agree(stop: bool) -> bool:
            return self.interruption.agree(self._highest, (stop,), "stop evaluating")[0]

        return validate(
            self.program,
            self.validation,
            self.callbacks,
            self.world,
            agree,
            keep,
            common_logs=common_logs(self.trainer),
        )
