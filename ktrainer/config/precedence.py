"""Which value of a key wins: of a file or the command line, else of a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ktrainer.config.schema import Config

# Arguments of `Model.fit`, and the keys that mean the same.
KEYS = {
    "batch_size": "data.batch_size",
    "epochs": "trainer.epochs",
    "verbose": "logging.progress",
    "shuffle": "data.shuffle",
    "steps_per_epoch": "trainer.limit_train_batches",
    "validation_steps": "trainer.limit_val_batches",
    "validation_freq": "trainer.validate_every",
}


def merge_call_arguments(
    config: Config, given: Mapping[str, Any], call: str = "fit"
) -> tuple[Config, tuple[str, ...]]:
    """The configuration of one call, and one line for each argument that is overridden.

    Args:
        config: of the Trainer. A key that a file or the command line set wins over the argument.
        given: values of keys, by argument; None for one that was not given.
        call: where the arguments come from.
    """
    overruled = []
    for argument, value in given.items():
        if value is None:
            continue
        key = KEYS[argument]
        section, leaf = key.split(".")
        group = getattr(config, section)
        present, origin = getattr(group, leaf), config.origin(key)
        if origin is None:
            config = config.with_changes(**{section: replace(group, **{leaf: value})})
        elif present != value:
            overruled.append(f"{argument}: {present} ({origin}) instead of {value} ({call})")
    return config, tuple(overruled)


def key_origins(layer: Mapping[str, Any], origin: str, path: str = "") -> dict[str, str]:
    """The dotted keys that a layer of the configuration sets, each with `origin`."""
    found: dict[str, str] = {}
    for key, value in layer.items():
        inner = f"{path}.{key}" if path else str(key)
        nested = isinstance(value, Mapping)
        found |= key_origins(value, origin, inner) if nested else {inner: origin}
    return found
