"""The arguments of `Model.fit`, `evaluate` and `predict`: settings of one call.

An argument is the script's default: what a config file or the command line says wins over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from ktrainer.config import Config
from ktrainer.config.command_line import require_taken_words
from ktrainer.data.data_arguments import (
    kind_of,
    require_no_targets,
    split_validation,
)
from ktrainer.errors import ConfigError, DataError
from ktrainer.training.keras_limits import limit_fit, limit_steps

_PROGRESS = {
    "0": "none",
    "1": "auto",
    "2": "plain",
    "auto": "auto",
    "False": "none",
    "True": "auto",
}

# Arguments of `Model.fit`, and the keys that mean the same.
_KEYS = {
    "batch_size": "data.batch_size",
    "epochs": "trainer.epochs",
    "verbose": "logging.progress",
    "shuffle": "data.shuffle",
    "steps_per_epoch": "trainer.limit_train_batches",
    "validation_steps": "trainer.limit_val_batches",
    "validation_freq": "trainer.validate_every",
}


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call of `fit`, `evaluate` or `predict`.

    Attributes:
        config: the Trainer's configuration with the arguments of the call.
        overruled: one line for each argument that a file or the command line overrides.
        data: the data of the call, a tuple `(x, y, sample_weight)` where it has parts.
        validation_data: the same for validation, or None.
        class_weight: weight of each class in the loss.
        callbacks: of this call only.
        initial_epoch: number of the first epoch.
        batches_per_epoch: for `fit`, after so many the next epoch continues with the next batch;
            for the others, where the pass ends. None for passes over all of the data.
        validation_epochs: after which epochs to validate, counted from 1; None for
            `trainer.validate_every`.
        validation_batch_size: rows of a validation batch, for arrays; None for
            `data.batch_size`.
        verbose: as given, for callbacks that ask `params` for it.
    """

    config: Config
    overruled: tuple[str, ...] = ()
    data: Any = None
    validation_data: Any = None
    class_weight: Mapping[int, float] | None = None
    callbacks: tuple[Any, ...] = ()
    initial_epoch: int = 0
    batches_per_epoch: int | None = None
    validation_epochs: frozenset[int] | None = None
    validation_batch_size: int | None = None
    verbose: int | str = "auto"

    def facts(self) -> dict[str, Any]:
        """The facts that must be equal on all ranks: the configuration, and the other arguments."""
        beside = (
            "initial_epoch",
            "batches_per_epoch",
            "validation_epochs",
            "validation_batch_size",
        )
        given = {name: str(getattr(self, name)) for name in beside}
        config = self.config.to_dict(redacted=True)
        # Rank 0 alone shows it: a script may give the others `verbose=0`.
        logging = {k: v for k, v in config["logging"].items() if k != "progress"}
        return {**config, "logging": logging, "arguments": given}


def fit_arguments(
    config: Config,
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    callbacks: Any,
    initial_epoch: int,
    steps_per_epoch: int | None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] | None = None,
    class_weight: Mapping[int, float] | None = None,
    **settings: Any,
) -> CallArguments:
    """The arguments of `Trainer.fit` as `CallArguments`.

    Raises:
        ConfigError: an argument has a value that it cannot have; or no Trainer of the script has
            the words of the launch.
        DataError: parts of the data do not go together.
    """
    require_taken_words()
    _check_integer("initial_epoch", initial_epoch, at_least=0)
    _check_integer("validation_batch_size", validation_batch_size)
    every, epochs = _validation_freq(validation_freq)
    if isinstance(validation_data, list):
        validation_data = tuple(validation_data)  # as in Keras; x alone would be several inputs
    settings |= {
        "validation_steps": validation_steps,
        "steps_per_epoch": steps_per_epoch,
        "validation_freq": every,
    }
    validates = validation_data is not None or bool(validation_split)
    config, settings = limit_fit(config, settings, validates)
    effective, overruled = _merge_arguments(config, _validated(settings))
    steps = settings["steps_per_epoch"] if config.origin(_KEYS["steps_per_epoch"]) is None else None
    if config.origin(_KEYS["validation_freq"]) is not None:
        epochs = None
    data = _pack_data(x, y, sample_weight)
    if validation_split and validation_data is None:
        data, validation_data = split_validation(data, validation_split)
    if not _names_batch_size(config, settings["batch_size"]):
        if validation_batch_size is None:
            validation_batch_size = _validation_batch_size(
                config, settings["validation_steps"], steps, validation_data
            )
        effective = _with_batch(effective, _batch_of(data, steps))
    return CallArguments(
        effective,
        overruled,
        data=data,
        validation_data=validation_data,
        class_weight=class_weight,
        callbacks=callback_list(callbacks),
        initial_epoch=initial_epoch,
        batches_per_epoch=steps,
        validation_epochs=epochs,
        validation_batch_size=validation_batch_size,
        verbose="auto" if settings.get("verbose") is None else settings["verbose"],
    )


def pass_arguments(
    call: str,
    config: Config,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None,
    steps: int | None,
    callbacks: Any,
    verbose: Any = None,
) -> CallArguments:
    """The arguments of `Trainer.evaluate` and `Trainer.predict` as `CallArguments`.

    Args:
        call: which of the two.
    """
    _check_integer("steps", steps)
    steps = limit_steps(steps)
    given = _validated({"batch_size": batch_size})
    effective, overruled = _merge_arguments(config, given, call)
    data = _pack_data(x, y, sample_weight)
    if not _names_batch_size(config, batch_size):
        effective = _with_batch(effective, _batch_of(data, steps))
    return CallArguments(
        effective,
        overruled,
        data=data,
        callbacks=callback_list(callbacks),
        batches_per_epoch=steps,
        verbose="auto" if verbose is None else verbose,
    )


def _names_batch_size(config: Config, given: int | None) -> bool:
    """Whether a batch size was given."""
    return given is not None or config.is_set(_KEYS["batch_size"])


def _batch_of(data: Any, steps: int | None) -> int | None:
    """Rows of a batch of arrays such that `steps` of them hold all, as in Keras."""
    if steps is None or data is None or kind_of(data) != "arrays":
        return None
    rows = next(int(part.shape[0]) for part in keras.tree.flatten(data) if part is not None)
    return -(-rows // steps)


def _validation_batch_size(
    config: Config, validation_steps: int | None, steps: int | None, data: Any
) -> int | None:
    """Rows of a validation batch where no batch size was given; None for `data.batch_size`.

    Args:
        steps: `steps_per_epoch`, which may have set `data.batch_size` for the call.
        data: to validate on.
    """
    overruled = config.origin(_KEYS["validation_steps"]) is not None
    rows = _batch_of(data, None if overruled else validation_steps)
    # `steps_per_epoch` makes no batches of validation data.
    return rows if steps is None else rows or config.data.batch_size


def _with_batch(config: Config, batch_size: int | None) -> Config:
    if batch_size is None:
        return config
    return config.with_changes(data=replace(config.data, batch_size=batch_size))


def _pack_data(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Parts of data as one: a lone tuple is `(x, y, sample_weight)` already.

    Raises:
        DataError: there is no data, or `y` or sample weights come beside data that brings its own.
    """
    if x is None:
        raise DataError("there is no data: give x, or x and y, or a dataset")
    if y is None and sample_weight is None:
        return x
    require_no_targets(x, y, sample_weight)
    if y is None:
        if isinstance(x, tuple) and len(x) == 2:
            return (*x, sample_weight)
        return (x,)  # as in Keras, weights without targets are not used
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def callback_list(callbacks: Any) -> tuple[Any, ...]:
    """Callbacks given as one, as several, or as None."""
    if callbacks is None:
        return ()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return tuple(callbacks.callbacks)
    if isinstance(callbacks, keras.callbacks.Callback):
        return (callbacks,)
    return tuple(callbacks)


def _validated(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments as values of their configuration keys.

    Raises:
        ConfigError: one of them cannot have its value.
    """
    for name, value in given.items():
        if name in ("batch_size", "steps_per_epoch", "validation_steps"):
            _check_integer(name, value)
        elif name == "epochs":
            _check_integer(name, value, at_least=0)
    verbose, shuffle = given.get("verbose"), given.get("shuffle")
    if verbose is not None:
        if str(verbose) not in _PROGRESS:
            raise _wrong("verbose", verbose, "0, 1, 2 or 'auto'")
        given = {**given, "verbose": _PROGRESS[str(verbose)]}
    if shuffle is not None and shuffle != "batch":
        given = {**given, "shuffle": bool(shuffle)}
    return given


def _validation_freq(given: Any) -> tuple[str | None, frozenset[int] | None]:
    """`trainer.validate_every`, and the epochs to validate after if they are a list."""
    if given is None:
        return None, None
    if isinstance(given, Collection) and not isinstance(given, str):
        return "1ep", frozenset(int(epoch) for epoch in given)
    _check_integer("validation_freq", given)
    return f"{int(given)}ep", None


def _check_integer(name: str, value: Any, at_least: int = 1) -> None:
    if value is None or (isinstance(value, (int, np.integer)) and int(value) >= at_least):
        return
    raise _wrong(name, value, f"a whole number, at least {at_least}")


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"the argument {name} is {wanted}, not {value!r}.", value=value)


def _merge_arguments(
    config: Config, given: Mapping[str, Any], call: str = "fit"
) -> tuple[Config, tuple[str, ...]]:
    """The configuration of one call, and a line for each argument that a key overrides.

    Args:
        config: of the Trainer. A key that a file or the command line set wins over the argument.
        given: values of keys, by argument; None for one that was not given.
        call: where the arguments come from.
    """
    overruled = []
    for argument, value in given.items():
        if value is None:
            continue
        key = _KEYS[argument]
        section, leaf = key.split(".")
        group = getattr(config, section)
        present, origin = getattr(group, leaf), config.origin(key)
        if origin is None:
            config = config.with_changes(**{section: replace(group, **{leaf: value})})
        elif present != value:
            overruled.append(f"{argument}: {present} ({origin}) instead of {value} ({call})")
    return config, tuple(overruled)
