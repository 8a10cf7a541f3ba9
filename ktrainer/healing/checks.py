"""What healing needs of the data, the callbacks and the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ktrainer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ktrainer.fit import Fit


def check_data(fit: Fit) -> None:
    """Refuse data that could not be read again: an interrupted epoch is, up to where it stood.

    Raises:
        DataError: saying what to pass instead.
    """
    given = (fit.call.data, fit.call.validation_data)
    for data, feed in zip(given, (fit.feed, fit.validation), strict=True):
        source = getattr(feed, "source", None)
        if isinstance(data, tf.data.Dataset):
            raise DataError(
                "world.heal=true needs data that can be read again in the same order, which a "
                "tf.data.Dataset that shuffles cannot: pass the function that makes it"
            )
        if source is not None and not source.reopens:
            raise DataError(
                "world.heal=true needs data that can be read again, which a generator cannot: pass "
                "the function that makes it, arrays or a PyDataset"
            )


def check_callbacks(callbacks: list[Any]) -> None:
    """Refuse callbacks that cannot move to another rank.

    Raises:
        ConfigError: naming it.
    """
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ConfigError(
            "keras.callbacks.BackupAndRestore loads weights on one rank where that becomes the "
            "first: with world.heal=true use checkpoint.every instead",
            path="world.heal",
        )


def changes_in_parts(fit: Fit) -> bool:
    """Whether one call may change weights in parts: more than one update, or more than one
    optimizer; or statistics, which ranks average once the weights are updated."""
    config, model = fit.trainer.config.trainer, fit.model
    stock = type(model).train_step is keras.Model.train_step
    statistics = [v for v in model.non_trainable_variables if "seed" not in v.name]
    return not stock or config.steps_per_call > 1 or config.accumulate > 1 or bool(statistics)
