"""Keras' limits for debugging: `keras.config.set_max_epochs` and `set_max_steps_per_epoch`, or
`KERAS_MAX_EPOCHS` and `KERAS_MAX_STEPS_PER_EPOCH`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from ktrainer.config import Config

_LIMITED = {
    "epochs": "epochs",
    "steps_per_epoch": "limit_train_batches",
    "validation_steps": "limit_val_batches",
}  # arguments of `Model.fit`, and their keys of `trainer`


def limit_fit(
    config: Config, settings: dict[str, Any], validates: bool
) -> tuple[Config, dict[str, Any]]:
    """The configuration and the arguments of a `fit` with at most as many epochs and steps.

    Args:
        config: whose keys win over arguments if a file or the command line set them.
        settings: arguments by name; None for one that was not given.
        validates: whether there is validation data.
    """
    steps = keras.config.max_steps_per_epoch()
    most = {"epochs": keras.config.max_epochs(), "steps_per_epoch": steps}
    if validates:
        most["validation_steps"] = steps
    for name, limit in most.items():
        key, given = _LIMITED[name], settings.get(name)
        wins = config.origin(f"trainer.{key}") is not None
        configured = getattr(config.trainer, key)
        if not _exceeds(configured if wins or given is None else given, limit, name):
            continue
        settings = {**settings, name: limit}
        if wins:
            config = config.with_changes(trainer=replace(config.trainer, **{key: limit}))
    return config, settings


def limit_steps(steps: int | None) -> int | None:
    """The steps of an `evaluate` or `predict` with at most as many."""
    limit = keras.config.max_steps_per_epoch()
    return limit if _exceeds(steps, limit, "steps_per_epoch") else steps


def _exceeds(value: Any, limit: int | None, name: str) -> bool:
    """Whether a value is more than a limit, or may be, with a warning. A fraction is left to the
    feed, which knows of how many batches."""
    known = isinstance(value, (int, np.integer))
    if not limit or isinstance(value, float) or (known and value <= limit):
        return False
    warnings.warn(f"Limiting {name} to {limit}", stacklevel=5)
    return True
