"""Logs of a step: numbers by name, nested in dicts and lists as a user's step returns them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

LogPath = tuple[str | int, ...]  # keys of dicts and positions in lists, from the outside in

_ABSENT = object()

_warned: set[str] = set()


def flatten_paths(logs: Any) -> dict[LogPath, Any]:
    """The values nested in `logs`, by path, in order."""
    return dict(_flatten(logs, ()))


def unflatten_paths(logs: Any, values: Mapping[LogPath, Any]) -> Any:
    """`logs` with other `values`; entries of dicts that have none are left out, those of lists
    are None."""
    known = _unflatten(logs, values, ())
    return None if known is _ABSENT else known


def path_name(path: LogPath) -> str:
    """A path as one string, which no other path has."""
    return str(path[0]) if len(path) == 1 else json.dumps(path)


def as_number(value: Any) -> np.ndarray | None:
    """A number, or several, as an array; None for anything else."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "fiub" or _is_half(array) else None


def losses_are_finite(logs: Mapping[str, Any] | None) -> bool:
    """Whether every loss in `logs` is finite; when nothing is called a loss, every scalar."""
    logs = logs or {}
    scalars = {
        p: n
        for p, v in flatten_paths(logs).items()
        if (n := as_number(v)) is not None and not n.ndim
    }
    return all(math.isfinite(value) for value in losses_of(scalars))


def losses_of(values: Mapping[LogPath, Any]) -> list[Any]:
    """The values that are called a loss; when none is, all."""
    losses = [value for path, value in values.items() if any(map(_is_loss, path))]
    return losses or list(values.values())


def _is_loss(key: str | int) -> bool:
    return isinstance(key, str) and "loss" in key and not key.startswith("val_")


def as_keras_flattens(logs: Mapping[str, Any]) -> dict[str, Any]:
    """`logs` as Keras gives them to callbacks: without dicts in dicts, each entry called by its
    inner key alone. Of several with one name Keras keeps one; that is warned of."""
    found: dict[str, dict[tuple[str, ...], Any]] = {}
    for path, value in _named(logs, ()):
        found.setdefault(path[-1], {})[path] = value
    for name, entries in found.items():
        if len(entries) > 1:
            _warn(name, [".".join(path) for path in sorted(entries)])
    # Keras goes through each dict in the order of its keys, and the last one stays.
    return {name: entries[max(entries)] for name, entries in found.items()}


def as_floats(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """The scalars among `logs` as floats, named as Keras does; the rest is left out."""
    scalars: dict[str, float] = {}
    for key, value in as_keras_flattens(logs or {}).items():
        try:
            scalars[key] = float(value)
        except (TypeError, ValueError):
            continue
    return scalars


def _flatten(logs: Any, path: LogPath) -> Iterator[tuple[LogPath, Any]]:
    if isinstance(logs, Mapping):
        for key, value in logs.items():
            yield from _flatten(value, (*path, key))
    elif isinstance(logs, (list, tuple)):
        for i, value in enumerate(logs):
            yield from _flatten(value, (*path, i))
    else:
        yield path, logs


def _unflatten(logs: Any, values: Mapping[LogPath, Any], path: LogPath) -> Any:
    if isinstance(logs, Mapping):
        parts = {key: _unflatten(value, values, (*path, key)) for key, value in logs.items()}
        return {key: part for key, part in parts.items() if part is not _ABSENT}
    if isinstance(logs, (list, tuple)):
        entries = [_unflatten(value, values, (*path, i)) for i, value in enumerate(logs)]
        return [None if entry is _ABSENT else entry for entry in entries]
    return values.get(path, _ABSENT)


def _named(logs: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    for key, value in logs.items():
        if isinstance(value, Mapping):
            yield from _named(value, (*path, key))
        else:
            yield (*path, key), value


def _is_half(array: np.ndarray) -> bool:
    return array.dtype.name == "bfloat16"


def _warn(name: str, places: list[str]) -> None:
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{' and '.join(places)} of a step's logs are both called {name!r} in History and for "
        f"callbacks, as Keras flattens logs, and only {places[-1]} is kept. Give them names that "
        "differ.",
        stacklevel=4,
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
