"""A deadline for calls of MPI that have none, and no form that could be polled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ktrainer.errors import DeadlineExceeded
from ktrainer.world.base import World

T = TypeVar("T")


def in_time(world: World, call: Callable[[], T], what: str) -> T:
    """The result of `call()`, which runs in a thread that is left behind at the deadline.

    Raises:
        DeadlineExceeded: it did not return in time; names rank, step and `what`.
    """
    found: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, name="ktrainer-blocking", daemon=True)
    thread.start()
    thread.join(world.deadline)
    if not found:
        raise DeadlineExceeded(world.rank, world.step, what, world.deadline)
    value, error = found[0]
    if error is not None:
        raise error
    return value
