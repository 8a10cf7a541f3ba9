"""The signals that the launcher notes, and acts on when it looks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def noted() -> Iterator[list[int]]:
    """Gives a list to which signals to this process are added, in place of what they would do."""
    found: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        found.append(number)

    before = {number: signal.signal(number, note) for number in WANTED}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
