"""Which saved array belongs to which variable of this model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_COUNTER = re.compile(r"_\d+")


def match(
    saved: Mapping[str, np.ndarray], variables: Sequence[tuple[str, Any]]
) -> tuple[list[tuple[Any, str]], list[str]]:
    """Pair variables with saved arrays, by name. Values are not looked at.

    Keras numbers unnamed layers by the history of the process (`dense_3`), so where the names
    do not all agree, arrays are paired in order, if their names agree but for such numbers.

    Args:
        saved: arrays, or stand-ins of their shapes and dtypes, by name, in the order in which
            they were saved.
        variables: (name, variable) of this model.

    Returns:
        (variable, name of its array) pairs, and every mismatch in words. Use the pairs only if
        there are no mismatches.
    """
    named = dict(variables)
    if set(saved) == set(named):
        order = {name: name for name in named}
    elif [_COUNTER.sub("", n) for n in saved] == [_COUNTER.sub("", n) for n in named]:
        order = dict(zip(named, saved, strict=True))
    else:
        order = {name: name for name in named if name in saved}
    problems = [f"{name} is not in the checkpoint" for name in named if name not in order]
    taken = set(order.values())
    problems += [f"{name} is in the checkpoint alone" for name in saved if name not in taken]
    pairs = []
    for name, key in order.items():
        problem = _differs(named[name], saved[key])
        if problem:
            problems.append(f"{name} {problem}")
        pairs.append((named[name], key))
    return pairs, problems


def _differs(variable: Any, array: np.ndarray) -> str | None:
    shape, dtype = tuple(variable.shape), str(variable.dtype)
    if shape != array.shape:
        return f"has shape {list(shape)}, but {list(array.shape)} in the checkpoint"
    if dtype != array.dtype.name:
        return f"has dtype {dtype}, but {array.dtype.name} in the checkpoint"
    return None
