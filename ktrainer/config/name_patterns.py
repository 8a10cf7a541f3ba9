"""Patterns of layers' names, in configuration keys: regular expressions that match whole names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NoReturn

from ktrainer.errors import ConfigError


def compile_pattern(pattern: str, path: str) -> re.Pattern[str]:
    """A pattern, compiled.

    Args:
        path: the configuration key that holds it.

    Raises:
        ConfigError: it is no regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        message = f"{pattern!r} is no regular expression: {error}."
        raise ConfigError(message, path=path, value=pattern) from None


def matches(pattern: re.Pattern[str], name: str) -> bool:
    """Return whether a pattern matches a name, or that of a layer around it.

    Args:
        name: from the model down, such as `block_3/attention/query`.
    """
    parts = re.sub(r":\d+(?=/|$)", "", name).split("/")
    return any(pattern.fullmatch("/".join(parts[: n + 1])) for n in range(len(parts)))


def refuse_unmatched(pattern: str, names: Iterable[str], path: str) -> NoReturn:
    """Refuse a pattern that matches nothing.

    Args:
        names: all that it could have matched, from the model down.
        path: the configuration key that holds it.

    Raises:
        ConfigError: with the nearest names.
    """
    raise ConfigError(
        f"the pattern {pattern!r} matches no layer. The nearest names are "
        f"{_nearest_names(pattern, names)}.",
        path=path,
    )


def _nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> str:
    from difflib import SequenceMatcher

    every: dict[str, None] = {}
    for name in names:
        parts = name.split("/")
        every.update(dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts))))

    def distance(name: str) -> float:
        last = name.rpartition("/")[2]
        return -max(SequenceMatcher(None, pattern, n).ratio() for n in (name, last))

    return ", ".join(repr(name) for name in sorted(every, key=distance)[:count])
