"""Triggers of a `fit`: how long it trains, and what is due every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktrainer.state.durations import Duration

if TYPE_CHECKING:
    from ktrainer.config import Config


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


def _duration(text: str | None) -> Duration | None:
    return None if text is None else Duration.parse(text)
