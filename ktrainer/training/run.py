"""One call of `fit`: its feeds, callbacks and program are opened, trained with, and closed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.callbacks.base import Callback, gradient_hooks, on_rank
from ktrainer.callbacks.callback_list import CallbackList
from ktrainer.callbacks.trackers.tracker import import_trackers
from ktrainer.checkpoint.contents.plain_attributes import note_attributes
from ktrainer.checkpoint.export.keras_file import save_checkpoints_on_all_ranks
from ktrainer.data import ShuffleOrder
from ktrainer.data.rank_consistency import check_consistency, model_facts, without_order
from ktrainer.runtime.folder_lock import FolderLock, seconds_after_loss
from ktrainer.runtime.run_folder import hold_run_folder
from ktrainer.steps.program_cache import warn_of_frozen_layers
from ktrainer.training.call_arguments import CallArguments
from ktrainer.training.context import RunContext
from ktrainer.training.default_callbacks import make_callbacks
from ktrainer.training.fit_feeds import FitFeeds
from ktrainer.training.fit_settings import (
    callbacks_config,
    callbacks_without_files,
    check_model,
    guard_of,
    step_options,
    versions_that_compute,
)
from ktrainer.training.loop import Loop, drive
from ktrainer.training.preemption import SignalHandlers
from ktrainer.training.run_facts import end_facts
from ktrainer.training.triggers import make_triggers
from ktrainer.tuning.learning_rate_range import range_test_callbacks
from ktrainer.tuning.range_test_mode import current_range_test
from ktrainer.tuning.sweep_reports import add_sweep_reports
from ktrainer.verify.first_update_check import check_first_update
from ktrainer.verify.known_differences import known_differences, print_new
from ktrainer.verify.update_recorder import UnsplitUpdates, recorded_callbacks, recorded_run
from ktrainer.verify.update_split import Split, split_of
from ktrainer.verify.verify_mode import current_verify_run

if TYPE_CHECKING:
    from ktrainer.state.train_state import TrainState
    from ktrainer.steps import Program
    from ktrainer.training.recovery_protocol import Recovery


class Run:
    """Everything that one `fit` needs, opened in order and closed together.

    Args:
        context: configuration, ranks and backend of the call.
        state: of the run; the feeds and the program are put there.
        call: the arguments of `fit`.
        callbacks: those of every call; left out where a callback has called this `fit`.
        trainer: what callbacks see as their `trainer`.

    Attributes:
        feeds: of training and validation data.
        every: the callbacks of all ranks, as the first rank may be another one later.
        callbacks: Keras' list of those of this rank.
    """

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        call: CallArguments,
        callbacks: Iterable[keras.callbacks.Callback],
        trainer: object,
    ) -> None:
        self.context, self.state, self.call, self._trainer = context, state, call, trainer
        self.feeds = FitFeeds(context, state, call)
        self.model: keras.Model = state.model
        self._lock: FolderLock | None = None
        self._triggers = make_triggers(context.config, call.initial_epoch, call.validation_epochs)
        self.callbacks = CallbackList(state=state)
        self.check()
        # Before the feeds: which collectives follow depends on these.
        validation = "none" if call.validation_data is None else "given"
        if self.feeds.validates_on_training_dataset():
            validation = "the PyDataset of training"
        given = {"validation data": validation}
        check_consistency(context.world, config=call.facts(), data_facts=given)
        try:
            self.feeds.open()
            self._open_callbacks([*([] if state.inside else callbacks), *call.callbacks])
            self._open_program()
            state.call_facts = self._call_facts()
        except BaseException:
            self.close()
            raise
        if not state.inside:
            state.fits += 1

    def check(self) -> None:
        """Refuse what could not be trained as configured."""
        check_model(self.model, self.context.config)

    def train(self, recovery: Recovery) -> keras.callbacks.History:
        """Train to the end; see `ktrainer.training.loop`."""
        with self.loop(recovery) as loop:
            return drive(recovery.updates(loop), loop.run_program)

    @contextmanager
    def loop(self, recovery: Recovery) -> Iterator[Loop]:
        """The loop of the run, which has its folder and handles signals inside the block."""
        context, state = self.context, self.state
        if not (context.config.trainer.fast_dev_run or state.joining):
            # Made now: it says what runs, even if nothing else is written.
            self._lock = hold_run_folder(context.run_dir, context.world)
        signals = SignalHandlers(context.config.trainer.interrupt)
        loop = Loop(context, state, self.callbacks, self._triggers, signals, recovery)
        with ExitStack() as stack:
            if not state.inside:  # the outer `fit` handles signals, and ends as it can
                stack.enter_context(signals.installed())
                stack.enter_context(recorded_run(self.verify_run))
            stack.enter_context(closing(recovery))
            try:
                yield loop
            except BaseException as error:
                state.end = state.end or end_facts(error)
                raise
            state.end = end_facts(None, state.stop_reason)

    def ranks_changed(
        self, run_dir: str | None, order: ShuffleOrder | None, lengths: Sequence[int | None]
    ) -> None:
        """Reopen the feeds and reassign the callbacks for a new set of ranks.

        Args:
            run_dir: the run's folder, which joining ranks do not know.
            order: of the data, as it was drawn at the start.
            lengths: of the data, where a rank knew them.
        """
        self.feeds.reopen(order, lengths)
        if run_dir is not None:
            self.context.folder.path = Path(run_dir)
            world = self.context.world
            if world.is_root and self._lock is None:
                seconds = seconds_after_loss(world.deadline)
                self._lock = FolderLock(Path(run_dir), "run folder", seconds)
        self._reassign_callbacks(self.state.joining)

    def close(self) -> None:
        """Stop the feeds' background work, and let callbacks go of files and the screen; all of
        them, also if one of a user's fails."""
        with ExitStack() as all_of_it:  # the last one that is pushed comes first
            for callback in reversed(self.callbacks.callbacks):
                if isinstance(callback, Callback):
                    all_of_it.callback(callback.close)
            if self._lock is not None:
                all_of_it.callback(self._lock.release)
            all_of_it.callback(self.feeds.close)

    # -- callbacks

    def _open_callbacks(self, users: list[Any]) -> None:
        context, config = self.context, self.context.config
        batches, accumulate = self.state.feed.num_batches, config.trainer.accumulate
        self.state.steps_per_epoch = None if batches is None else -(-batches // accumulate)
        self.every = make_callbacks(callbacks_config(config), users)
        if not self.state.joining:
            import_trackers(self.every, context.world)
        self.verify_run = current_verify_run()
        if self.verify_run is not None:
            remote = getattr(config.backend, "strategy", None) == "parameter_server"
            self.every = recorded_callbacks(self.every, self.verify_run, remote)
        if (range_test := current_range_test()) is not None:
            self.every = range_test_callbacks(self.every, range_test)
        add_sweep_reports(self.every)
        context.backend.check_callbacks(self.every)
        if config.trainer.fast_dev_run:
            self.every = callbacks_without_files(self.every, context.world)
        if config.backend.name == "pipeline":
            save_checkpoints_on_all_ranks(self.every)
        # The list calls set_model, where schedules of the learning rate are put in: the step
        # must be traced after that.
        self.callbacks = CallbackList(
            on_rank(self.every, context.world.rank),
            state=self.state,
            add_history=True,
            model=self.model,
            epochs=self._triggers.epochs,
            steps=self.state.steps_per_epoch,
            verbose=self.call.verbose,
        )
        for callback in self.callbacks.callbacks:
            if isinstance(callback, Callback):
                callback.set_trainer(self._trainer)

    def _reassign_callbacks(self, joining: bool) -> None:
        """Run the callbacks that belong to this rank after the set of ranks changed: rank 0 has
        those that write.

        Args:
            joining: whether this rank has run no callbacks yet.
        """
        present = self.callbacks.callbacks
        others = [c for c in present if c not in self.every]  # Keras' History
        mine = on_rank(self.every, self.context.world.rank)
        self.callbacks.callbacks = [*mine, *others]
        new = [c for c in self.callbacks.callbacks if c not in present or joining]
        for callback in new:
            callback.set_params(self.callbacks.params)
            callback.set_model(self.model)
            if isinstance(callback, Callback):
                callback.set_trainer(self._trainer)
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # to what the first rank before this one has written
        if joining:
            self.callbacks.on_train_begin()
        else:
            for callback in new:
                callback.on_train_begin()
        note_attributes(new)

    # -- program

    def _open_program(self) -> None:
        context, config = self.context, self.context.config
        program = self.state.program = self._program()
        split = split_of(config, context.plan)
        cut = config.backend.name == "pipeline"
        if cut:  # look at it while each process has all of the model
            self._look_for_differences(split)
        program.build(self.state.feed.spec)
        if context.world.is_root:
            warn_of_frozen_layers(program)
        self.state.data_facts = self.feeds.facts()
        if context.world.size > 1:
            check_consistency(
                context.world,
                model_facts=model_facts(self.model),
                data_facts=self.state.data_facts,
                versions=versions_that_compute(),
            )
        if not cut:
            self._look_for_differences(split)

    def _program(self) -> Program:
        # Hooks are traced into the step, so all ranks need them, those of writers too.
        guard = guard_of(self.every, self.model)
        options = step_options(self.context.config, tuple(gradient_hooks(self.every)), guard)
        if self.verify_run is not None and self.verify_run.role == "unsplit":
            return UnsplitUpdates(self.model, replace(options, accumulate=1))
        return self.context.program_for(self.model, options)

    def _look_for_differences(self, split: Split) -> None:
        """Warn of a loss that is another one when split; keep what the display says besides."""
        context, state = self.context, self.state
        if state.joining:
            return
        model, feeds = self.model, self.feeds.opened
        facts = check_first_update(model, feeds, context.config, context.plan, context.world)
        state.differences = tuple(known_differences(model, state.feed, split, facts))
        if str(self.call.verbose) == "0" and context.config.logging.progress == "none":
            # The script wants no progress bar; this is none.
            print_new(state.differences, state.differences_said, context.world)

    def _call_facts(self) -> dict[str, str]:
        """Facts that are the same when the script calls this `fit` again, but for the seed of the
        order, which each start may draw."""
        given = without_order(self.state.data_facts)
        return {**given, "trainable variables": str(len(self.model.trainable_variables))}
