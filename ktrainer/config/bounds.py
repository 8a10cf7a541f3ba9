"""Dataclass fields that carry their bounds, for `ktrainer.config.check` to hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BOUNDS = "ktrainer"


@dataclass(frozen=True)
class NumberBounds:
    """Bounds of a number: at_least <= value <= at_most, value > above.

    `fraction`: a float is a fraction, which is at most 1.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    fraction: bool = False


@dataclass(frozen=True)
class DurationBounds:
    """Units that a duration may have, and whether it must be above zero."""

    units: tuple[str, ...] = ("ep", "ba", "s")
    positive: bool = True


def number(default: Any, **bounds: Any) -> Any:
    """A field holding a number within bounds; see `NumberBounds`."""
    return field(default=default, metadata={BOUNDS: NumberBounds(**bounds)})


def duration(default: Any, **bounds: Any) -> Any:
    """A field holding a duration such as "500ba"; see `DurationBounds`."""
    return field(default=default, metadata={BOUNDS: DurationBounds(**bounds)})
