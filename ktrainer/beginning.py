"""Where a `fit` begins, when it is not at the beginning."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktrainer.trainer import Trainer
    from ktrainer.world import World

NO_BATCHES = (
    "the training data has no batches: give more rows, or check data.batch_size and "
    "data.drop_remainder"
)


def skip_to_initial_epoch(trainer: Trainer, initial_epoch: int) -> None:
    """Begin with `initial_epoch`, or where Keras' BackupAndRestore, which runs on rank 0, says."""
    model: Any = trainer.model
    said = int(model._initial_epoch or initial_epoch)
    epoch = trainer.world.broadcast(said, what="initial epoch")
    progress = trainer.progress
    if epoch > progress.epoch:
        progress.epoch = epoch
        # The learning rate and `max_steps` go by the step.
        progress.step = epoch * (trainer.steps_per_epoch or 0)


def warn_if_stopped(model: Any, world: World) -> None:
    """Say why a run that was stopped does nothing when it is started again."""
    if model.stop_training and world.is_root:
        warnings.warn(
            "training had been stopped when the checkpoint was made, so there is nothing to "
            "do; checkpoint.resume=never starts afresh",
            stacklevel=3,
        )


def warn_if_late(late: bool, trainer: Trainer) -> None:
    """Say why a run whose time is up does nothing when it is started again."""
    if late and trainer.world.is_root:
        warnings.warn(
            f"training had taken {trainer.progress.elapsed:.0f} s when the checkpoint was "
            "made, which is all of trainer.max_time, so there is nothing to do",
            stacklevel=3,
        )
