"""Triggers of a `fit`: how long it trains, and what is due every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktrainer.state.durations import Duration, Every

if TYPE_CHECKING:
    from ktrainer.config import Config
    from ktrainer.distributed import World
    from ktrainer.state.progress import Progress
    from ktrainer.state.train_state import TrainState


@dataclass(frozen=True)
class Triggers:
    """The times of saving, logging and validation.

    Attributes:
        epochs: passes over the data, in all.
        max_steps: updates in all; None for no limit.
        max_seconds: seconds of training in all, over restarts; None for no limit.
        validate: how often to validate; None for never.
        log: how often to gather the logs of all ranks.
        accumulate: local batches an update.
        initial_epoch: number of the first epoch.
        validation_epochs: those, counted from 1, that are validated after; None for all that
            `validate` says.
    """

    epochs: int = 1
    max_steps: int | None = None
    max_seconds: float | None = None
    validate: Duration | None = None
    log: Duration | None = None
    accumulate: int = 1
    initial_epoch: int = 0
    validation_epochs: frozenset[int] | None = None

    def validates_after(self, epoch: int) -> bool:
        """Whether an epoch, counted from 0, is one that may be validated after."""
        return self.validation_epochs is None or epoch + 1 in self.validation_epochs


def make_triggers(
    config: Config, initial_epoch: int, validation_epochs: frozenset[int] | None
) -> Triggers:
    """Return the times from the configuration, durations parsed.

    Args:
        initial_epoch, validation_epochs: as of `Triggers`.
    """
    trainer = config.trainer
    dev = bool(trainer.fast_dev_run)
    seconds = Duration.parse(trainer.max_time) if trainer.max_time else None
    return Triggers(
        epochs=initial_epoch + 1 if dev else trainer.epochs,
        max_steps=None if dev else trainer.max_steps,
        max_seconds=seconds.seconds if seconds else None,
        validate=_duration("1ep" if dev else trainer.validate_every),
        log=_duration(config.logging.every),
        accumulate=trainer.accumulate,
        initial_epoch=initial_epoch,
        validation_epochs=validation_epochs,
    )


class DueEvents:
    """Decides when validation and logs are due, the same on every rank.

    Args:
        triggers: how often.
        state: of the run; without validation data, validation is never due.
        world: the ranks.
    """

    def __init__(self, triggers: Triggers, state: TrainState, world: World) -> None:
        self._triggers, self._state, self._world = triggers, state, world
        validate = triggers.validate if state.validation is not None else None
        self._validate = Every(validate, state.steps_per_epoch)
        self._log = Every(triggers.log, state.steps_per_epoch)

    def start(self) -> None:
        """Begin to count at the present progress."""
        for every in (self._validate, self._log):
            every.start(self._state.progress)

    def heal(self, progress: Progress) -> None:
        """Return to an earlier `progress`, after which updates are repeated."""
        for every in (self._validate, self._log):
            every.heal(progress)

    def validates(self) -> bool:
        """Whether to validate now, inside an epoch."""
        return self._is_due(self._validate)

    def validates_at_end(self, epoch: int) -> bool:
        """Whether to validate now, at the end of an epoch."""
        due = self._is_due(self._validate, epoch_end=True)
        return due and self._triggers.validates_after(epoch)

    def logs(self) -> bool:
        """Whether to gather the logs of all ranks now."""
        return self._is_due(self._log)

    def updates_until_due(self) -> int | None:
        """Updates until one of them is due; None if the end of an epoch or the clock decides."""
        counts = [e.updates_until_due(self._state.progress) for e in (self._validate, self._log)]
        return min((count for count in counts if count is not None), default=None)

    def _is_due(self, every: Every, epoch_end: bool = False) -> bool:
        due = every.due(self._state.progress, epoch_end=epoch_end)
        if every.needs_agreement:  # clocks differ: rank 0's decides
            due = bool(self._world.broadcast(due, what="is it time"))
        return due


def _duration(text: str | None) -> Duration | None:
    return None if text is None else Duration.parse(text)
