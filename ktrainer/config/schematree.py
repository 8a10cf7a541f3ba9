"""Facts about the schema: its keys, their types, and which name is meant by a wrong one."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ktrainer.config.backends import BACKENDS, BackendConfig
from ktrainer.config.bounds import BOUNDS, DurationBounds, NumberBounds
from ktrainer.config.schema import Config

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
    return item.metadata.get(BOUNDS)


def default_of(item: Field[Any]) -> Any:
    """The default value of a field."""
    return item.default if item.default_factory is NO_DEFAULT else item.default_factory()


_DURATIONS = {"ep": "'1ep'", "ba": "'500ba'", "s": "'10m'"}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def expected(item: Field[Any], hint: Any) -> str:
    """What a key takes, in words: "a whole number or null"."""
    optional = type(None) in alternatives(hint)
    bound = bounds(item)
    if isinstance(bound, DurationBounds):
        words = ["a duration such as " + ", ".join(_DURATIONS[unit] for unit in bound.units)]
    elif choices(hint):
        words = ["one of " + ", ".join(choices(hint))]
        words = ["true", "false", *choices(hint)] if bool in alternatives(hint) else words
    elif get_origin(hint) in (list, dict):
        words = ["a list" if get_origin(hint) is list else "a group of NAME: VALUE"]
    elif float in alternatives(hint) and int in alternatives(hint):
        words = ["a whole number", "a fraction such as 0.1"]
    else:
        words = [_WORDS.get(t, "a value") for t in alternatives(hint) if t is not type(None)]
    return " or ".join([*words, "null"] if optional else words)


def lookup(path: str, backend: str | None = None) -> tuple[Field[Any], Any] | None:
    """The field and type at a dotted path, or None; list items are written `a.b[0].c`."""
    group: type = Config
    found: tuple[Field[Any], Any] | None = None
    for part in path.split("."):
        name = part.split("[")[0]
        if name not in hints(group):
            return None
        hint = hints(group)[name]
        found = schema_fields(group)[name], hint
        group = group_of(hint) or item_group(hint) or type(None)
        if group is BackendConfig:
            group = BACKENDS.get(backend or "", BackendConfig)
        if not is_dataclass(group):
            return found if part == path.split(".")[-1] else None
    return found


def walk_schema(group: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """(path, field, type) of every key below `group`, each group before its keys."""
    for name, hint in hints(group).items():
        yield prefix + name, schema_fields(group)[name], hint
        if (inner := group_of(hint)) and inner is not BackendConfig:
            yield from walk_schema(inner, f"{prefix}{name}.")


def suggest(path: str, backend: str = "local") -> str | None:
    """The path that is most likely meant by an unknown one.

    The same name in another group counts most (`epochs` -> `trainer.epochs`), then a name
    spelled alike in the same group, then one spelled alike anywhere.
    """
    known = [p for p, _, _ in walk_schema(Config)]
    known += [p for p, _, _ in walk_schema(BACKENDS.get(backend, BackendConfig), "backend.")]
    return likest(path, known)


def likest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is most likely meant by `name`, or None."""
    score, best = max((_likeness(name, candidate), candidate) for candidate in names)
    return best if score >= 0.7 else None


def _likeness(path: str, candidate: str) -> float:
    """How likely `candidate` is meant by `path`: the last name counts, then the group."""
    parent, _, name = path.lower().replace("-", "_").rpartition(".")
    group, _, leaf = candidate.rpartition(".")
    score = SequenceMatcher(None, name, leaf).ratio()
    if len(name) >= 3 and leaf.startswith(name):
        score = max(score, 0.85)
    if score < 0.65:
        return 0.0
    if group == parent:
        return score + 0.15
    return score + 0.1 * SequenceMatcher(None, parent, group).ratio()
