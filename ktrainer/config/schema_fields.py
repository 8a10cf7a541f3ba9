"""Fields of the schema's dataclasses: declared with bounds, and inspected.

`number` and `duration` declare a field with bounds, which `ktrainer.config.value_checks` enforces.
"""

from __future__ import annotations

import types
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_BOUNDS = "ktrainer"


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
    return field(default=default, metadata={_BOUNDS: NumberBounds(**bounds)})


def duration(default: Any, **bounds: Any) -> Any:
    """A field holding a duration such as "500ba"; see `DurationBounds`."""
    return field(default=default, metadata={_BOUNDS: DurationBounds(**bounds)})


_hints: dict[Any, dict[str, Any]] = {}


def hints(group: Any) -> dict[str, Any]:
    """Types of a group's keys, in order."""
    if group not in _hints:
        found = get_type_hints(group)
        _hints[group] = {f.name: found[f.name] for f in fields(group)}
    return _hints[group]


def schema_fields(group: Any) -> dict[str, Field[Any]]:
    """The dataclass fields of a group, by name."""
    return {f.name: f for f in fields(group)}


def group_of(hint: Any) -> type | None:
    """The dataclass that `hint` names, or None when the key is no group."""
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def item_group(hint: Any) -> type | None:
    """The dataclass of a list's items, or None."""
    return group_of(get_args(hint)[0]) if get_origin(hint) is list else None


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def choices(hint: Any) -> tuple[str, ...]:
    """The names that a `Literal` key may have; empty for any other type."""
    return next((get_args(t) for t in alternatives(hint) if get_origin(t) is Literal), ())


def bounds(item: Field[Any]) -> NumberBounds | DurationBounds | None:
    """The bounds that a field was declared with."""
    return item.metadata.get(_BOUNDS)


def default_of(item: Field[Any]) -> Any:
    """The default value of a field."""
    return item.default if item.default_factory is NO_DEFAULT else item.default_factory()


_DURATIONS = {"ep": "'1ep'", "ba": "'500ba'", "s": "'10m'"}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def expected(item: Field[Any], hint: Any) -> str:
    """The values of a key in words: "a whole number or null"."""
    optional = type(None) in alternatives(hint)
    kinds = {get_origin(kind) for kind in alternatives(hint)}
    bound = bounds(item)
    if isinstance(bound, DurationBounds):
        words = ["a duration such as " + ", ".join(_DURATIONS[unit] for unit in bound.units)]
    elif choices(hint):
        words = ["one of " + ", ".join(choices(hint))]
        words = ["true", "false", *choices(hint)] if bool in alternatives(hint) else words
        words = ["a whole number", *choices(hint)] if int in alternatives(hint) else words
    elif kinds & {list, dict}:
        words = ["a list" if list in kinds else "a group of NAME: VALUE"]
    elif float in alternatives(hint) and int in alternatives(hint):
        words = ["a whole number", "a fraction such as 0.1"]
    else:
        words = [_WORDS.get(t, "a value") for t in alternatives(hint) if t is not type(None)]
    return " or ".join([*words, "null"] if optional else words)
