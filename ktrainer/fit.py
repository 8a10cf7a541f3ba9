"""One call of `Trainer.fit`: its feeds, its callbacks, its program, and the order of starting."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.arguments import CallArguments
from ktrainer.callbacks import assemble
from ktrainer.callbacks.base import Callback, gradient_hooks, on_rank
from ktrainer.checkpoint import resume
from ktrainer.feed import (
    Feed,
    ShuffleOrder,
    make_feed,
    order_of,
    place_facts,
    require_end,
    take_place,
)
from ktrainer.fit_settings import (
    callbacks_config,
    check_model,
    data_config,
    guard_of,
    step_options,
    versions_that_compute,
)
from ktrainer.folderlock import FolderLock
from ktrainer.interruption import Interruption
from ktrainer.loop import Loop
from ktrainer.preflight import check_agreement, data_facts, model_facts
from ktrainer.restarted import run_before
from ktrainer.runfolder import hold_run_folder
from ktrainer.schedule import make_schedule
from ktrainer.steps import Steps
from ktrainer.verify.first_step import check_first_step
from ktrainer.verify.mode import current_verify_run
from ktrainer.verify.recorder import UnsplitUpdates, recorded_callbacks, recorded_run

if TYPE_CHECKING:
    from ktrainer.trainer import Trainer


class Fit:
    """Everything that one run of `fit` needs, made in order and closed together.

    Args:
        trainer: whose world and backend are used; its config is that of the call.
        call: the arguments of `Trainer.fit`.
    """

    def __init__(self, trainer: Trainer, call: CallArguments) -> None:
        self.trainer, self.call = trainer, call
        self._feeds: list[Feed] = []
        self._lock: FolderLock | None = None
        self.callbacks = keras.callbacks.CallbackList()
        config = trainer.config
        assert trainer.model is not None
        self.model = trainer.model
        check_model(self.model, config)
        # Before the feeds: which collectives follow depends on these.
        given = {"validation data": "none" if call.validation_data is None else "given"}
        check_agreement(trainer.world, config=call.facts(), data_facts=given)
        try:
            self._open_feeds(None, check=config.health.check_data)
            # Those of the Trainer belong to the `fit` that this one is inside of, if to any.
            always = [] if trainer.inside else trainer.callbacks
            self._prepare([*always, *call.callbacks])
        except BaseException:
            self.close()
            raise

    def run(self) -> keras.callbacks.History:
        """Train; see `ktrainer.loop`."""
        if not (self.trainer.config.trainer.fast_dev_run or self.trainer.joining):
            # Made now: it says what runs, even if nothing else is written.
            self._lock = hold_run_folder(self.trainer.run_dir, self.trainer.world)
        schedule = replace(
            make_schedule(self.trainer.config),
            initial_epoch=self.call.initial_epoch,
            validation_epochs=self.call.validation_epochs,
        )
        interruption = Interruption(self.trainer.config.trainer.interrupt)
        loop = Loop(
            self.trainer,
            self.program,
            self.callbacks,
            self.feed,
            self.validation,
            schedule,
            interruption,
        )
        if self.trainer.inside:  # the `fit` outside notes signals, and ends as it can
            return loop.run()
        with interruption.noted(), recorded_run(self.verify_run):
            return self._train(loop)

    def _train(self, loop: Loop) -> keras.callbacks.History:
        if not self.trainer.world.heals:
            return loop.run()
        from ktrainer.healing import survival_of

        loop.survival = survival_of(self, loop, self.trainer.world)  # type: ignore[arg-type]
        try:
            return loop.survival.run()
        finally:
            loop.survival.close()

    def follow(self, run_dir: str | None, order: ShuffleOrder | None) -> None:
        """Feed and call back for the ranks of now, after some have died or joined.

        Args:
            run_dir: the run's folder, which newcomers do not know.
            order: of the data, as it was drawn at the start.
        """
        trainer = self.trainer
        lengths = [feed.source_batches for feed in self._feeds]
        known = [self.feed.spec, self.validation.spec if self.validation else None]
        for feed in self._feeds:
            feed.close()
        self._feeds = []
        self._open_feeds(order, check=trainer.config.health.check_data)
        for feed, length in zip(self._feeds, lengths, strict=False):
            feed.source_batches = feed.source_batches or length  # which reading has shown
        for feed, spec in zip(self._feeds, known, strict=False):
            if feed.spec == spec:
                feed.spec = spec  # the very one that the steps were compiled for
        if run_dir is not None:
            trainer.take_run_dir(Path(run_dir))
        if trainer.world.is_root and self._lock is None and run_dir is not None:
            self._lock = FolderLock(Path(run_dir), "run folder")
        self._call_back()

    def _call_back(self) -> None:
        """Let the callbacks run that belong to this rank now: the first one writes, too."""
        present = self.callbacks.callbacks
        others = [c for c in present if c not in self.every]  # Keras' History
        self.callbacks.callbacks = [*on_rank(self.every, self.trainer.world.rank), *others]
        new = [c for c in self.callbacks.callbacks if c not in present or self.trainer.joining]
        for callback in new:
            callback.set_params(self.callbacks.params)
            callback.set_model(self.model)
            if isinstance(callback, Callback):
                callback.set_trainer(self.trainer)
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # to what the first rank before this one has written
        if self.trainer.joining:
            self.callbacks.on_train_begin()
        else:
            for callback in new:
                callback.on_train_begin()

    def _open_feeds(self, order: ShuffleOrder | None, check: bool) -> None:
        limits = self.trainer.config.trainer
        call = self.call
        if order is None and data_config(self.trainer.config).shuffle:
            order = order_of(self.trainer.world, self.trainer.config)
        fewer = limits.fast_dev_run or limits.overfit_batches
        self.feed = self._feed(
            call.data,
            training=True,
            order=order,
            check=check,
            limit=fewer or (None if call.batches_per_epoch else limits.limit_train_batches),
            batches_per_epoch=None if fewer else call.batches_per_epoch,
            class_weight=call.class_weight,
        )
        self.feed.first_epoch = call.initial_epoch
        if limits.max_steps is None and limits.max_time is None:
            require_end(
                self.feed,
                "steps_per_epoch=..., trainer.limit_train_batches=... or trainer.max_steps=...",
            )
        self.validation: Feed | None = None
        limit = limits.fast_dev_run or limits.limit_val_batches
        if call.validation_data is not None and limit != 0:
            self.validation = self._feed(
                call.validation_data,
                training=False,
                limit=limit,
                check=check,
                batch_size=call.validation_batch_size,
            )
            require_end(self.validation, "validation_steps=... or trainer.limit_val_batches=...")

    def resume(self) -> None:
        """Restore what `checkpoint.resume` asks for, on all ranks."""
        config = self.trainer.config
        mode = config.checkpoint.resume
        if config.trainer.fast_dev_run:
            return
        if self.trainer.inside:  # it is run again, whole, if what is outside goes back before it
            return
        # An earlier start of the same launch is further than what `resume` names.
        run = self.trainer.world.broadcast(run_before(self.trainer.checkpoint_dir), 0, "restart")
        mode = mode if run is None else "auto"
        if self.trainer.fits > 1 and mode not in ("auto", "never"):
            if self.trainer.world.is_root:
                warnings.warn(
                    f"checkpoint.resume={mode} is where the first call of fit begins; this is "
                    f"number {self.trainer.fits}, which begins with the model as it is",
                    stacklevel=4,
                )
            return
        progress = resume(
            mode,
            self.trainer.checkpoint_dir,
            model=self.model,
            world=self.trainer.world,
            callbacks=self.callbacks.callbacks,
            history=self.model.history,
            feed=self.feed if config.checkpoint.iterators else None,
            counted=self.trainer.counted,
            run=run,
            check=partial(take_place, self.feed, config),
        )
        if progress is not None:
            self.trainer.progress = progress

    def place_facts(self) -> dict[str, Any]:
        """What the position in the training data depends on, by name."""
        return place_facts(self.feed, self.trainer.config)

    def close(self) -> None:
        """Stop the feeds' background work, and let callbacks go of files and the screen; all of
        them, also if one of a user's fails."""
        with ExitStack() as all_of_it:  # the last one that is pushed comes first
            for callback in reversed(self.callbacks.callbacks):
                if isinstance(callback, Callback):
                    all_of_it.callback(callback.close)
            if self._lock is not None:
                all_of_it.callback(self._lock.release)
            for feed in reversed(self._feeds):
                all_of_it.callback(feed.close)

    def _feed(self, data: Any, **settings: Any) -> Feed:
        trainer = self.trainer
        feed = make_feed(
            data,
            world=trainer.world,
            config=data_config(trainer.config),
            **settings,
        )
        self._feeds.append(feed)
        return feed

    def _prepare(self, users: list[Any]) -> None:
        trainer, config = self.trainer, self.trainer.config
        batches, accumulate = self.feed.num_batches, config.trainer.accumulate
        trainer.steps_per_epoch = None if batches is None else -(-batches // accumulate)
        # Those of other ranks too: the first rank may be another one later.
        self.every = assemble(callbacks_config(config), trainer.world, users)
        self.verify_run = current_verify_run()
        if self.verify_run is not None:
            remote = getattr(config.backend, "strategy", None) == "parameter_server"
            self.every = recorded_callbacks(self.every, self.verify_run, remote)
        trainer.backend.check_callbacks(self.every)
        mine = on_rank(self.every, trainer.world.rank)
        # The list calls set_model, where schedules of the learning rate are put in: the step
        # must be traced after that.
        self.callbacks = keras.callbacks.CallbackList(
            mine,
            add_history=True,
            model=self.model,
            epochs=make_schedule(config).epochs,
            steps=trainer.steps_per_epoch,
            verbose=self.call.verbose,
        )
        # Keras may hand events to a thread, where collectives of callbacks would lose their order.
        self.callbacks._async_train = self.callbacks._async_test = False
        self.callbacks._async_predict = False
        for callback in self.callbacks.callbacks:
            if isinstance(callback, Callback):
                callback.set_trainer(trainer)
        # Hooks are traced into the step, so all ranks need them, those of writers too.
        guard = guard_of(self.every, self.model)
        options = step_options(config, tuple(gradient_hooks(self.every)), guard)
        if self.verify_run is not None and self.verify_run.role == "unsplit":
            self.program: Steps = UnsplitUpdates(self.model, replace(options, accumulate=1))
        else:
            self.program = trainer.program_for(self.model, options)
        cut = config.backend.name == "pipeline"
        if cut:
            self._check_first_step()  # while each process has all of the model
        self.program.build(self.feed.spec)
        if trainer.world.size > 1:
            check_agreement(
                trainer.world,
                model_facts=model_facts(self.model),
                data_facts=self._data_facts() if config.health.check_data else {},
                versions=versions_that_compute(),
            )
        if not cut:
            self._check_first_step()

    def _check_first_step(self) -> None:
        trainer = self.trainer
        if not trainer.joining:
            check_first_step(self.model, self._feeds, trainer.config, trainer.plan, trainer.world)

    def _data_facts(self) -> dict[str, str]:
        """What all ranks must see first, of both kinds of data."""
        facts = data_facts(self.feed)
        if self.validation is not None:
            facts |= data_facts(self.validation, "validation")
        return facts
