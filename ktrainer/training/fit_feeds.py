"""The data of one `fit`, opened for the present ranks: to train with, and to validate on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import keras

from ktrainer.data import Feed, ShuffleOrder, make_feed, order_of, require_end
from ktrainer.data.rank_consistency import data_facts
from ktrainer.training.call_arguments import CallArguments
from ktrainer.training.context import RunContext
from ktrainer.training.fit_settings import data_config

if TYPE_CHECKING:
    from ktrainer.state.train_state import TrainState


class FitFeeds:
    """The feeds of a `fit`'s training and validation data: `state.feed` and `state.validation`.

    Args:
        context, state, call: as of `ktrainer.training.run.Run`.

    Attributes:
        opened: those that are open.
    """

    def __init__(self, context: RunContext, state: TrainState, call: CallArguments) -> None:
        self._context, self._state, self._call = context, state, call
        self.opened: list[Feed] = []

    @property
    def lengths(self) -> list[int | None]:
        """Batches of one pass over each kind of data, some of which only reading shows."""
        return [feed.source_batches for feed in self.opened]

    def facts(self) -> dict[str, str]:
        """Facts of both kinds of data that must be the same on all ranks; none if they are not to
        be compared (`health.check_data`)."""
        if not self._context.config.health.check_data:
            return {}
        facts = data_facts(self._state.feed)
        if self._state.validation is not None and not self.validates_on_training_dataset():
            facts |= data_facts(self._state.validation, "validation")
        return facts

    def validates_on_training_dataset(self) -> bool:
        """Return whether one PyDataset is given as both kinds of data: a look at its validation
        might reorder it, while its first epoch is read ahead."""
        data = self._call.data
        return isinstance(data, keras.utils.PyDataset) and self._call.validation_data is data

    def open(self, order: ShuffleOrder | None = None) -> None:
        """Open the data of the call, for the ranks of now.

        Args:
            order: that was drawn before; None draws one.
        """
        config, world, state = self._context.config, self._context.world, self._state
        if order is None:
            # Not counted inside another: a resume does not know how many came before.
            order = order_of(world, config, 0 if state.inside else state.fits)
        state.feed = self._open_training_data(order)
        state.validation = None
        limits = config.trainer
        if self._call.validation_data is not None and limits.limit_val_batches != 0:
            state.validation = self._open(
                self._call.validation_data,
                "validation_steps=... or trainer.limit_val_batches=...",
                training=False,
                limit=limits.fast_dev_run or limits.limit_val_batches,
                batch_size=self._call.validation_batch_size,
            )

    def reopen(self, order: ShuffleOrder | None, lengths: Sequence[int | None]) -> None:
        """Open the data once more; the steps that were compiled for it still fit.

        Args:
            order: as it was drawn at the start.
            lengths: where a rank knew them.
        """
        known = [feed.spec for feed in self.opened]
        for feed in self.opened:
            feed.close()
        self.opened = []
        self.open(order)
        if self._state.validation is not None:
            self._state.validation.replay_passes(self._state.progress.validations)
        for feed, length, spec in zip(self.opened, lengths, known, strict=True):
            feed.source_batches = feed.source_batches or length
            if feed.spec == spec:
                feed.spec = spec  # the very one that the steps were compiled for

    def close(self) -> None:
        """Stop the background work of all, also if one of them fails."""
        with ExitStack() as all_of_it:
            for feed in reversed(self.opened):
                all_of_it.callback(feed.close)

    def _open_training_data(self, order: ShuffleOrder | None) -> Feed:
        call, limits = self._call, self._context.config.trainer
        fewer = limits.fast_dev_run or limits.overfit_batches
        ends = limits.max_steps is not None or limits.max_time is not None
        feed = self._open(
            call.data,
            None
            if ends
            else "steps_per_epoch=..., trainer.limit_train_batches=... or trainer.max_steps=...",
            training=True,
            order=order,
            limit=fewer or (None if call.batches_per_epoch else limits.limit_train_batches),
            batches_per_epoch=None if fewer else call.batches_per_epoch,
            class_weight=call.class_weight,
        )
        feed.first_epoch = call.initial_epoch
        if limits.overfit_batches:
            feed.repeat_first_epoch()
        return feed

    def _open(self, data: Any, ended_by: str | None, **settings: Any) -> Feed:
        """A feed of `data`, refused where it has no end and nothing ends it.

        Args:
            ended_by: the settings that end it, for the message; None: something does.
        """
        config = self._context.config
        feed = make_feed(
            data,
            world=self._context.world,
            config=data_config(config),
            check=config.health.check_data,
            device=self._context.backend.input_device,
            **settings,
        )
        self.opened.append(feed)
        if ended_by is not None:
            require_end(feed, ended_by)
        return feed
