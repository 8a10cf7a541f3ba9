"""Replacements of functions of Keras and TensorFlow that act in the threads of a step alone.

While a step is traced, data sources compute in threads of their own, which must find the original
functions: a replacement is for the whole process, so each asks in which thread it is called.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

_entered = threading.local()


def entered_here() -> tuple[Any, ...]:
    """What this thread has entered, the innermost last."""
    found: tuple[Any, ...] = getattr(_entered, "scopes", ())
    return found


@contextmanager
def entered_in_this_thread(*scopes: Any) -> Iterator[None]:
    """Let replacements that belong to `scopes` act in this thread."""
    before = entered_here()
    _entered.scopes = (*before, *scopes)
    try:
        yield
    finally:
        _entered.scopes = before


def is_entered(scope: Any) -> bool:
    """Whether this thread has entered `scope`."""
    return any(each is scope for each in entered_here())


@contextmanager
def replaced_in(
    scope: Any, replaced: Iterable[tuple[Any, str, Callable[..., Any]]]
) -> Iterator[None]:
    """Replace functions, inside the block, in threads that have entered `scope`.

    Args:
        scope: any object; see `entered_in_this_thread`.
        replaced: owners, names, and what is called instead.
    """
    with ExitStack() as stack:
        for owner, name, replacement in replaced:
            either = in_threads_of(scope, replacement, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, either))
        yield


def in_threads_of(
    scope: Any, replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """`replacement` in threads that have entered `scope`, `original` in others."""

    @functools.wraps(original, updated=())  # TensorFlow's notes are of the original alone
    def either(*args: Any, **named: Any) -> Any:
        return (replacement if is_entered(scope) else original)(*args, **named)

    return either


def as_in_this_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for another thread, where it finds entered what this one has."""
    scopes = entered_here()

    def called_elsewhere(*args: Any) -> Any:
        missing = [scope for scope in scopes if not is_entered(scope)]
        with entered_in_this_thread(*missing):
            return function(*args)

    return called_elsewhere
