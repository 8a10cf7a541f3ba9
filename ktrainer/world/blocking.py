"""A deadline for calls of MPI that have none, and no form that could be polled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ktrainer.errors import DeadlineExceeded
from ktrainer.world.base import World

T = TypeVar("T")
_LOOK_SECONDS = 0.1


def in_time(
    world: World, call: Callable[[], T], what: str, others: Callable[[], str] | None = None
) -> T:
    """The result of `call()`, which runs in a thread that is left behind at the deadline.

    Args:
        world: whose ranks are waited for.
        call: the call.
        what: names it in the error.
        others: says what the others are doing, shortly before the deadline; default: the world
            asks them.

    Raises:
        DeadlineExceeded: it did not return in time; names rank, step, `what`, and who is missing.
    """
    found: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, name="ktrainer-blocking", daemon=True)
    end = time.monotonic() + world.deadline
    thread.start()
    thread.join(_LOOK_SECONDS)
    said: str | None = None
    while not found:
        left = end - time.monotonic()
        if said is None and left <= world.answer_seconds:
            said = others() if others is not None else world.who_is_missing(what)
        elif left <= 0:
            raise DeadlineExceeded(world.rank, world.step, what, world.deadline, said or "")
        world.answer(what)
        thread.join(min(_LOOK_SECONDS, max(left, 0.0)))
    value, error = found[0]
    if error is not None:
        raise error
    return value
