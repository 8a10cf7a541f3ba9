"""Deadlines for waits inside libraries that offer none and cannot be polled.

`call_with_deadline` runs one blocking call of MPI. `WaitWatchdog` observes waits that a step makes
through Horovod. Both answer stall reports meanwhile, so that ranks which wait are told from ranks
which have stopped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ktrainer.distributed.world import World
from ktrainer.errors import DeadlineExceeded

T = TypeVar("T")
_POLL_SECONDS = 0.1


def call_with_deadline(
    world: World, call: Callable[[], T], what: str, others: Callable[[], str] | None = None
) -> T:
    """The result of `call()`, which runs in a thread that is abandoned at the deadline.

    Args:
        world: whose ranks are waited for.
        call: the call.
        what: names it in the error.
        others: says what the other ranks are doing, shortly before the deadline; default: a stall
            report of the world.

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
    said: str | None = None
    try:
        thread.start()
        thread.join(_POLL_SECONDS)
        while not found:
            remaining = end - time.monotonic()
            if said is None and remaining <= world.answer_seconds:
                said = others() if others is not None else world.who_is_missing(what)
            elif remaining <= 0:
                raise DeadlineExceeded(world.rank, world.step, what, world.deadline, said or "")
            world.answer(what)
            thread.join(min(_POLL_SECONDS, max(remaining, 0.0)))
    except BaseException as interruption:
        world.record_interruption(interruption)
        raise
    value, error = found[0]
    if error is not None:
        raise error
    return value


class WaitWatchdog:
    """Ends this process when its waits, from `begin` to `end`, pass the deadline; they may overlap.

    Args:
        world: all ranks.
        what: what is waited for, for error messages.
    """

    def __init__(self, world: World, what: str) -> None:
        self.world, self.what = world, what
        self._lock = threading.Lock()
        self._waits = 0
        self._since: float | None = None  # when the oldest of the waits began
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Note that a wait begins."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._since = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(None, self._run, "ktrainer-watchdog", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Note that a wait has ended."""
        with self._lock:
            self._waits = max(0, self._waits - 1)
            if not self._waits:
                self._since = None

    def reset(self) -> None:
        """Note that no wait is under way: an error has ended them all."""
        with self._lock:
            self._waits, self._since = 0, None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            since, deadline = self._since, self.world.deadline
            if since is None:
                continue
            self.world.answer(self.what)
            answer_seconds = self.world.answer_seconds
            if time.monotonic() - since > deadline - answer_seconds:
                others = self.world.who_is_missing(self.what)
                if not self._closed.wait(max(0.0, since + deadline - time.monotonic())):
                    self._end_process(since, deadline, others)

    def _end_process(self, since: float, deadline: float, others: str) -> None:
        """End all ranks by an uncaught exception: see `ktrainer.distributed.mpi_world`."""
        if self._since != since:
            return  # the wait has ended after all
        error = DeadlineExceeded(self.world.rank, self.world.step, self.what, deadline, others)
        sys.excepthook(type(error), error, None)
