"""The nested loops of a run: epochs, updates, validation and stopping, the same on every rank.

    set_params, set_model, set_trainer
    on_train_begin                                                                  begin
    resume a checkpoint (load_state_dict, on_restore), or skip to initial_epoch
    until epochs, max_steps, max_time or a callback end it:                         train, _epoch
        on_epoch_begin (at the first one, rank 0's weights are broadcast)
        for the local batches of each update:                                       _batches
            on_train_batch_begin                                                    _update
            on_step_begin (the learning rate is set)
            program.train: forward, backward, all-reduce, on_gradients, clip, apply;
                or the body of a loop of the user's own (`trainer.steps`)
            after a call of several updates, of callbacks that can wait: on_train_batch_end of
                each but the last, and on_train_batch_begin of the next             _after_update
            on_step_end (the check for NaN)
            return to the last checkpoint, if a callback asked for it
            on_train_batch_end
            every logging.every, or if a callback asks (log_due): gather the logs of all ranks,
                on_log, where earlier callbacks may add values for later ones
            every trainer.validate_every, inside the epoch: validate, on_validation_end
            on_step_checkpoint (checkpoints are saved)
            vote on whether to stop, and whether to compare the ranks' times: on_slow
        on_epoch_cut, if a stop ended the epoch early
        validate at the epoch's end: on_test_begin, on_test_batch_*, on_test_end
        on_epoch_end
        vote on whether to stop
        gather what the time went to: on_times, on_slow
    on_train_end
    on_times, on_slow
    close, also after an error

When ranks were lost or have joined, at any time: load_state_dict, on_heal.

An epoch that a stop cuts short is validated and reported like any other, as in Keras, but does
not count as finished: a checkpoint of it holds the state from just before its `on_epoch_end`, and a
resumed run trains the rest of the epoch, then calls `on_epoch_end` again. It also calls
`on_epoch_begin` again, as does one that healed; what that assigns to variables is undone, since
they were restored from after the first time.

Whatever could differ between ranks (a stop, the clock, running out of data) is decided by all of
them together; no rank leaves the loop alone. The `Recovery` learns where an update begins and what
ranks can return to (`begin_step`, `commit`), and carries the votes.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import tensorflow as tf

from ktrainer.callbacks.averaged_weights import keep_averages, swap_back, swapped_as_before
from ktrainer.callbacks.base import emit
from ktrainer.callbacks.callback_list import CallbackList
from ktrainer.callbacks.csv_log import cut_logs_of_keras
from ktrainer.callbacks.loss_guard import LossGuard
from ktrainer.checkpoint.contents.capture_state import variables_here
from ktrainer.data import require_batches, warn_of_short_epochs
from ktrainer.data.data_digests import batch_facts
from ktrainer.runtime.devices import accelerator
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.nested_logs import flatten_paths, unflatten_paths
from ktrainer.state.progress import Phase, Progress
from ktrainer.state.time_shares import COMMUNICATION, START
from ktrainer.steps.program_cache import check_not_compiled_again, compile_state
from ktrainer.steps.step_helpers import unmoved
from ktrainer.training.evaluation import Validation, logs_so_far
from ktrainer.training.preemption import (
    PreemptionRequested,
    SignalHandlers,
    checkpoint_and_exit,
)
from ktrainer.training.resume import find_start, warn_that_nothing_is_trained
from ktrainer.training.roll_back import roll_back
from ktrainer.training.slow_watch import SlowWatch
from ktrainer.training.stop_decision import StopDecision
from ktrainer.training.triggers import DueEvents, Triggers
from ktrainer.training.updates_per_call import UpdatesPerCall, catches_up, max_updates_per_call

if TYPE_CHECKING:
    from ktrainer.data import LocalBatch
    from ktrainer.state.train_state import TrainState
    from ktrainer.steps import Program
    from ktrainer.training.context import RunContext
    from ktrainer.training.recovery_protocol import Recovery


Updates = list[list["LocalBatch"]]  # of one call of the program, each with its local batches
Running = Generator[Updates, Any, Any]  # yields updates to make, and is sent their logs


def drive(running: Running, update: Callable[[Updates], Any]) -> Any:
    """Make all updates that `running` yields; its result. It hears of errors too."""
    try:
        updates = next(running)
        while True:
            failed: BaseException | None = None
            try:
                logs = update(updates)
            except BaseException as error:
                failed = error
            # Outside of the handler, in which it would be the context of all errors that follow.
            try:
                updates = running.send(logs) if failed is None else running.throw(failed)
            finally:
                failed = None  # its traceback has this frame: a cycle would keep both
    except StopIteration as end:
        return end.value


class Loop:
    """The loops of one `fit`, or of one `steps`.

    Args:
        context: configuration, ranks and backend of the call.
        state: of the run, with its feeds and program.
        callbacks: those of this rank.
        triggers: how long to train, and what is due when.
        signals: what asks the process to end.
        recovery: what happens when ranks are lost.
    """

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        callbacks: CallbackList,
        triggers: Triggers,
        signals: SignalHandlers,
        recovery: Recovery,
    ) -> None:
        self.context, self.state, self.world = context, state, context.world
        self.callbacks, self.triggers = callbacks, triggers
        self.signals, self.recovery = signals, recovery
        self.program: Program = state.program
        self.model: keras.Model = state.model
        self._due = DueEvents(triggers, state, context.world)
        self._per_call = UpdatesPerCall(
            context.config.trainer.steps_per_call,
            lambda: self.program.can_train_many,
            triggers.accumulate,
        )
        # Callbacks may differ between ranks, which must all make the same calls.
        alone = self.world.size == 1 and not self.world.heals
        self._catching_up = [c for c in callbacks.callbacks if alone and catches_up(c)]
        limits = context.config.trainer
        self._limit = limits.fast_dev_run or limits.limit_train_batches or None
        guards = [c for c in callbacks.callbacks if isinstance(c, LossGuard)]
        self._stops_at_bad_loss = any(guard.stops_at_once for guard in guards)
        always = any(str(guard.every.duration) == "1ba" for guard in guards)
        self._waits_for_loss = always and accelerator() is not None
        self._watch = SlowWatch(context, state)
        self._stop = StopDecision(state, triggers, signals, recovery, self._watch)
        self._validation = Validation(context, state, callbacks, signals)
        self._updates_made = 1  # by the last call
        self._earlier_logs: list[Any] = []  # of its updates but the last, for `_catching_up`
        self._started = 0.0
        self._end_due = False  # an epoch's end, though there is nothing left to train on
        self._compiled = compile_state(state.model)
        self._pending_logs: Any = None  # of an update that callbacks have not heard of
        self._first_call = True

    # -- beginning and resuming

    def begin(self) -> None:
        """Do everything before the first update."""
        state = self.state
        resumed, of_another_call = find_start(self.context, state, self.callbacks, self.triggers)
        self._start_clock()
        progress = state.progress
        if self.state.validation is None:
            self._validation.forget()
        if self.triggers.max_seconds is not None:
            self._check_time_left()
        # A checkpoint inside an epoch that a stop has cut has nothing of its end.
        cut = (state.stopped or state.out_of_time) and progress.epoch < self.triggers.epochs
        ended = cut or self.steps_left == 0 or not self._stop.cuts_epoch
        self._end_due = progress.validation_due or (ended and progress.batch > 0)
        self._cut_logs(resumed)
        if resumed and self._stop.is_final and self.world.is_root:
            warn_that_nothing_is_trained(state, self.triggers.epochs, of_another_call)

    def _cut_logs(self, resumed: bool) -> None:
        """Have Keras' CSVLogger continue where training does, unless a later `fit` of the script
        has written the rest of its file, and will cut it to what it was then."""
        ended = self._stop.is_final and not self._end_due
        if not resumed or not (ended or self.context.later_fit_began(self.state)):
            cut_logs_of_keras(self.callbacks.callbacks, resumed)

    def _check_time_left(self) -> None:
        """Stop where the time was used up before the resume."""
        stopped = self.state.stopped
        try:  # time counts over restarts, so it may have been used up
            self._stop.vote()
        except PreemptionRequested as request:
            self._exit(request)
        # A stop asked for as training began is obeyed after the next update, as without a limit.
        self.state.stopped = stopped
        if self.state.out_of_time and self.world.is_root:
            warnings.warn(
                f"training had taken {self.state.progress.elapsed:.0f} s when the checkpoint was "
                "made, which is all of trainer.max_time, so no update is made; raise "
                "trainer.max_time to continue",
                stacklevel=4,
            )

    def resume_at(self, phase: Phase, logs: Any, callbacks_up_to: tuple[int, int]) -> Progress:
        """Continue from `state.progress`, to which a Recovery has returned.

        Args:
            phase, logs: of the last update.
            callbacks_up_to: step and batch up to which all callbacks have run.

        Returns:
            The progress that callbacks know of.
        """
        known = {p: value for p, value in flatten_paths(logs).items() if value is not None}
        self._pending_logs = unflatten_paths(logs, known) if phase == Phase.UPDATED else None
        progress, self.state.counted.logs = self.state.progress, logs
        # What follows an update, or the last one of an epoch, is due even if nothing else is.
        self._end_due = phase == Phase.UPDATED or (
            phase == Phase.CALLBACKS_DONE and progress.batch > 0
        )
        self._started = time.monotonic() - progress.elapsed
        before = replace(progress, step=callbacks_up_to[0], batch=callbacks_up_to[1])
        self._due.heal(before)
        self._watch.ranks_changed()
        self._per_call.discard_pending()
        return before

    def _start_clock(self) -> None:
        """Count time and intervals from where a restore left them."""
        self._started = time.monotonic() - self.state.progress.elapsed
        self._due.start()

    # -- the loops

    def run_program(self, updates: Updates) -> Any:
        """Make the updates of one call of the program; returns the logs of the last, unread."""
        if len(updates) == 1:
            logs = [self.program.train(updates[0])]
        else:
            batches, wanted = [update[0] for update in updates], bool(self._catching_up)
            logs = self.program.train_many(batches, self._stops_at_bad_loss, wanted)
        self._updates_made, self._earlier_logs = len(logs), logs[:-1] if self._catching_up else []
        return logs[-1]

    def updates(self) -> Running:
        """Yield all updates from the present progress to the end; the History."""
        logs: dict[str, Any] | None = None
        try:
            while self._end_due or not self._stop.is_final:
                self._end_due = False
                logs = yield from self._epoch()
        except PreemptionRequested as request:
            self._exit(request)
        if self._first_call:  # all updates came before a resume: later calls continue from there
            progress = self.state.progress
            self.state.feed.read_up_to(progress.epoch, progress.batch * self.triggers.accumulate)
        self._finalize(logs)
        self._gather_times()
        return self.model.history

    def _finalize(self, logs: Any) -> None:
        """Put averages of the weights in place, and call `on_train_end`."""
        if not self.state.stopped or self.state.feed.exhausted:
            keep_averages(self.callbacks.callbacks)  # after a callback's stop Keras does not
        self.program.finalize_weights()
        self.callbacks.on_train_end(logs=logs)

    def _exit(self, request: PreemptionRequested) -> NoReturn:
        checkpoint_and_exit(self.context, self.state, self.callbacks, request, self._gather_times)

    def _gather_times(self) -> None:
        """Tell callbacks what the time since the last complete epoch went to."""
        progress = self.state.progress
        last = progress.epoch - (progress.batch == 0)
        self._watch.gather(max(0, last), self.callbacks.callbacks)

    def _epoch(self) -> Generator[Updates, Any, dict[str, Any]]:
        """Train the rest of an epoch, and end it; returns its logs."""
        state, progress, epoch = self.state, self.state.progress, self.state.progress.epoch
        first, begun = progress.batch, progress.begun
        if first == 0:
            self.model.reset_metrics()
            state.counted = MetricCounts()
        finished = self._stop.is_final  # a stop from here on is obeyed after the next update
        self._begin_epoch(epoch)
        if self._finish_interrupted_update() or finished:
            cut = self._stop.cuts_epoch
        else:
            cut = yield from self._batches(epoch, skip=first * self.triggers.accumulate)
        if progress.batch == 0:
            require_batches(state.feed, epoch)
            self.model.stop_training = True  # a generator that has nothing more to give
        if not cut and self.world.is_root:
            self._warn_of_short_epochs(epoch)
        state.epoch_complete = not cut
        if cut:
            emit(self.callbacks.callbacks, "on_epoch_cut", epoch)
        logs = logs_so_far(state, self.world)
        if self._due.validates_at_end(epoch):
            logs |= self._validation.run(keep=cut)
        else:
            if begun:  # maybe its validation was interrupted, and is not due after a resume
                swap_back(self.callbacks.callbacks)
            logs |= progress.validated  # after the epoch's last update
        self.callbacks.on_epoch_end(epoch, logs)
        if not cut:
            progress.finish_epoch()
        self._stop.vote("stop after epoch")
        self.recovery.commit(Phase.EPOCH_ENDED)
        self._watch.end_epoch(epoch, self.callbacks.callbacks)
        return logs

    def _warn_of_short_epochs(self, epoch: int) -> None:
        first, last = self.triggers.initial_epoch, self.triggers.epochs - 1
        wants_all = self._limit is None or epoch < last  # a limit is a maximum
        warn_of_short_epochs(self.state.feed, epoch, is_first=epoch == first, wants_all=wants_all)

    def _begin_epoch(self, epoch: int) -> None:
        """Call `on_epoch_begin`. Where the epoch had begun before, variables hold what it has
        assigned, as when it halves the learning rate, and what came after: they stay so."""
        progress = self.state.progress
        begun, ours = progress.begun, self.callbacks.callbacks
        with (
            unmoved(_state_of(self.model) if begun else []),
            swapped_as_before(ours if begun else []),
        ):
            self.callbacks.on_epoch_begin(epoch)  # which broadcasts the variables
        traced = not self._first_call or self.program.graphs
        if traced and self.model.compiled and not self.model.run_eagerly:
            check_not_compiled_again(self.model, self._compiled)
        else:
            self._compiled = compile_state(self.model)
        progress.begun = True
        self.program.shared_variables = len(self.model.variables)

    def _batches(self, epoch: int, skip: int) -> Generator[Updates, Any, bool]:
        """Train on an epoch's local batches but the first `skip`; whether a stop left some."""
        batches = self.state.feed.epoch(epoch, skip=skip)
        with closing(batches):
            for updates in self._calls(batches):
                logs = yield from self._update(updates)
                if self._after_update(logs):
                    return self._stop.cuts_epoch
        return False

    def _finish_interrupted_update(self) -> bool:
        """Do what an interruption left of the last update; whether to stop, on all ranks."""
        if self._pending_logs is not None:
            logs, self._pending_logs = self._pending_logs, None
            if self._after_update(logs):
                return True
        progress = self.state.progress
        if not progress.validation_due:
            return False
        self._validation.run_inside_epoch()
        logs, step = self.state.counted.logs, progress.step
        emit(self.callbacks.callbacks, "on_step_checkpoint", step, logs)
        return self._stop.vote()

    def _calls(self, batches: Iterator[LocalBatch]) -> Iterator[Updates]:
        """The updates of each compiled call, an update being a list of local batches."""
        times, feed = self.state.times, self.state.feed
        while True:
            take = partial(self._per_call.take, batches, self.steps_left, self._max_updates)
            with times.of(START if self._first_call else "data"):
                updates = self.signals.wait_for_data(take, alone=self.world.size == 1)
            if not updates:
                return
            if feed.spec is not None:
                self.program.build(feed.spec)  # wider, should a new shape have appeared
            yield updates

    def _update(self, updates: Updates) -> Running:
        """Have one call's updates made; returns its logs, unread."""
        progress = self.state.progress
        self.world.step = progress.step + 1
        if progress.step == 0 and self.world.size == 1:  # else ranks have compared it
            self.state.first_batch = batch_facts(updates[0][0].batch)
        self.callbacks.on_train_batch_begin(progress.batch)
        emit(self.callbacks.callbacks, "on_step_begin", progress.step)
        logs = yield from self._timed_call(updates)
        self._count(self._per_call.end_call(updates, self._updates_made), logs)
        self.recovery.commit(Phase.UPDATED, logs)
        return logs

    def _timed_call(self, updates: Updates) -> Running:
        """Have one call's updates made; its time is divided into computing and communication."""
        times, backend = self.state.times, self.context.backend
        share = START if self._first_call else "compute"
        counted, waited = times.seconds[COMMUNICATION], backend.communication_seconds
        with times.of(share):
            self.recovery.begin_step()
            logs = yield updates
            if self._waits_for_loss:  # as the loss guard does, and callbacks before it may
                wait_for(logs)
        if share != START and waited is not None and backend.communication_seconds is not None:
            # Of these, waits in this thread are counted already.
            waited = backend.communication_seconds - waited
            times.move(share, COMMUNICATION, waited - (times.seconds[COMMUNICATION] - counted))
        if self._first_call:
            self._first_call = False
            times.rest_is("loop")
        return logs

    def _count(self, updates: Updates, logs: Any) -> None:
        progress, counted = self.state.progress, self.state.counted
        for batches in updates:
            progress.advance(sum(batch.global_examples for batch in batches))
            if self.program.counts_metrics:
                counted.of_update = sum(batch.examples for batch in batches)
                counted.examples += counted.of_update
                counted.last = batches[-1].examples
        counted.logs = logs
        self.world.step = progress.step  # for messages of what follows a call of several updates
        progress.elapsed = time.monotonic() - self._started

    def _after_update(self, logs: Any) -> bool:
        """Run post-step callbacks, validation and checkpoints; return whether any rank asked to
        stop."""
        state, progress, ours = self.state, self.state.progress, self.callbacks.callbacks
        earlier, self._earlier_logs = self._earlier_logs, []
        self.callbacks.catch_up(self._catching_up, progress.batch - 1 - len(earlier), earlier)
        emit(ours, "on_step_end", progress.step, logs)
        if state.rollback is not None:
            with state.times.of("checkpoint"):
                roll_back(state, self.world, self.callbacks)
            self._due.start()
        common = self.context.has_common_logs
        batch_logs = logs_so_far(state, self.world, of_step=True) if common else logs
        self.callbacks.on_train_batch_end(progress.batch - 1, batch_logs)
        if self._due.logs() or state.log_due:
            state.log_due = False
            so_far = logs_so_far(state, self.world, of_step=True)
            emit(ours, "on_log", progress.step, dict(so_far))
        if self._due.validates():
            self._validation.run_inside_epoch()
        emit(ours, "on_step_checkpoint", progress.step, logs)
        self._watch.mark(self._updates_made)
        stop = self._stop.vote()
        self.recovery.commit(Phase.CALLBACKS_DONE)
        if self._stop.compares_times and not stop:
            self._watch.compare(ours)
        return stop

    # -- what is due

    @property
    def steps_left(self) -> int | None:
        """Updates until `trainer.max_steps`; None without that limit."""
        return self._stop.steps_left

    def _max_updates(self) -> int | None:
        """The most updates in one call for which callbacks, validation and logs can wait."""
        if self.model.stop_training and self.world.size == 1:  # asked for before the first update
            return 1
        limits = [max_updates_per_call(callback) for callback in self.callbacks.callbacks]
        limits.append(self._due.updates_until_due())
        return min((limit for limit in limits if limit is not None), default=None)


def _state_of(model: keras.Model) -> list[Any]:
    """The variables of this process that a checkpoint inside an epoch restores."""
    return [*(variable for _, variable in variables_here(model)), *model.metrics_variables]


def wait_for(logs: Any) -> None:
    """Wait until a device has computed the logs of an update."""
    for leaf in tf.nest.flatten(logs):
        if isinstance(leaf, tf.Tensor):
            leaf.numpy()
            return
