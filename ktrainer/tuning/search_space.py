"""The words of a sweep: `key=SPACE`, with the values that a key may have, and `key=value`.

| word | values |
|---|---|
| `key=a,b,c` | one of these |
| `key=log(low,high)` | a real number, its logarithm evenly spread |
| `key=uniform(low,high)` | a real number, evenly spread |
| `key=int(low,high)` | a whole number, both ends included |
| `key=value` | always this one; a comma in brackets, braces or quotes belongs to the value |
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ktrainer.errors import ConfigError, nearest

Value = str | int | float

KINDS = ("log", "uniform", "int")
_MOST_EXACT = 2**53  # Optuna's storages keep whole numbers as floats
MOST_COMBINATIONS = 10_000  # of a grid, which Optuna lists before each trial
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\((.*)\)\s*")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Space:
    """The values that a key may have.

    Attributes:
        key: dotted, as in `user.lr`.
        kind: `choice`, or one of `KINDS`.
        choices: the values of a choice, as they were written.
        low, high: the ends of the others, which are included.
    """

    key: str
    kind: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0

    def examples(self) -> list[Value]:
        """Values by which the space can be checked: all choices, or both ends."""
        return list(self.choices) if self.kind == "choice" else [self.low, self.high]

    def grid(self) -> Sequence[Value]:
        """All values.

        Raises:
            ConfigError: they cannot be counted.
        """
        if self.kind == "choice":
            return self.choices
        if self.kind == "int":
            return range(int(self.low), int(self.high) + 1)
        raise ConfigError(
            f"--sampler grid tries every value, and {self.key}={self} has no end of them: name "
            f"some, as in {self.key}={self.low!r},{self.high!r}, or take another sampler."
        )

    def __str__(self) -> str:
        if self.kind == "choice":
            return ",".join(self.choices)
        return f"{self.kind}({self.low!r},{self.high!r})"


def grid_size(spaces: Sequence[Space]) -> int:
    """The number of combinations of all values.

    Raises:
        ConfigError: they cannot be counted, or are too many to be listed.
    """
    size = math.prod(len(space.grid()) for space in spaces)
    if size > MOST_COMBINATIONS:
        raise ConfigError(
            f"--sampler grid tries every combination, and there are {size:,}, more than "
            f"{MOST_COMBINATIONS:,}: name fewer values, or take another sampler."
        )
    return size


def word(key: str, value: Value) -> str:
    """`key=value` for `ktrainer run`; a number keeps all its digits."""
    return f"{key}={value if isinstance(value, str) else repr(value)}"


def split_spaces(words: Sequence[str]) -> tuple[list[Space], list[str]]:
    """(the spaces, the words with one value) of words `key=...`.

    Raises:
        ConfigError: a space cannot be read, or a key has two words.
    """
    spaces: list[Space] = []
    fixed: list[str] = []
    for each in words:
        space = read_space(each)
        if space is None:
            fixed.append(each)
        else:
            spaces.append(space)
    keys = [space.key for space in spaces]
    for key in keys:
        if keys.count(key) > 1 or any(other.partition("=")[0].strip() == key for other in fixed):
            raise ConfigError("is given twice: a key has one space, or one value.", path=key)
    return spaces, fixed


def read_space(each: str) -> Space | None:
    """The space of a word; None for one value.

    Raises:
        ConfigError: it is meant as a space, and cannot be read.
    """
    key, _, text = each.partition("=")
    key = key.strip()
    parts, unclosed = _split(text)
    if unclosed and ("," in parts[-1] or re.match(rf"\s*({'|'.join(KINDS)})\s*\(", text)):
        message = f"has a {unclosed} that does not end: a value with one stands in quotes."
        raise ConfigError(message, path=key)
    if len(parts) > 1:
        return _choice(key, [part.strip() for part in parts])
    called = _CALL.fullmatch(text)
    if called is None:
        return None
    kind, inner = called.groups()
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        hint = f"Did you mean {near}(...)? " if near else ""
        raise ConfigError(
            f"there is no space {kind!r}. {hint}There are key=a,b,c, key=log(low,high), "
            "key=uniform(low,high) and key=int(low,high); a text stands in quotes.",
            path=key,
        )
    return _range(key, kind, inner.split(","))


def _choice(key: str, parts: list[str]) -> Space:
    if "" in parts:
        raise ConfigError("has a comma too many: a choice is key=a,b,c.", path=key)
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise ConfigError(f"names {twice!r} twice.", path=key)
    for part in parts:
        called = _CALL.fullmatch(part)
        if called is not None and called[1] in KINDS:
            raise ConfigError(
                f"has {part} among other values: a key has one range or several values, and a text "
                "stands in quotes.",
                path=key,
            )
    return Space(key, "choice", tuple(parts))


def _range(key: str, kind: str, ends: list[str]) -> Space:
    number = int if kind == "int" else float
    what = "whole numbers" if kind == "int" else "numbers"
    try:
        low, high = (number(end) for end in ends)
    except ValueError:
        raise ConfigError(
            f"{kind}({','.join(ends)}) needs two {what}: {key}={kind}(low,high).", path=key
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        message = f"{kind}({','.join(ends)}) needs finite ends, the lower one first."
        raise ConfigError(message, path=key)
    if kind == "int" and max(-low, high) > _MOST_EXACT:
        message = f"int({','.join(ends)}) has ends beyond 2**53, which no database keeps exactly."
        raise ConfigError(message, path=key)
    if kind == "log" and low <= 0:
        message = f"log({','.join(ends)}) needs ends above 0: only those have a logarithm."
        raise ConfigError(message, path=key)
    return Space(key, kind, (), low, high)


def _split(text: str) -> tuple[list[str], str]:
    """The parts between commas that are in no brackets and no quotes; and a bracket or quote that
    begins and does not end, if there is one."""
    parts, closing, quote = [""], list[str](), ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            parts.append("")
            continue
        parts[-1] += character
    opened = [begin for end in closing for begin, its in _PAIRS.items() if its == end]
    return parts, quote or (opened[-1] if opened else "")
