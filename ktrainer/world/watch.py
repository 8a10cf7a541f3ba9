"""Bounds waits that happen inside another library, which nobody here can end.

A thread of its own looks now and then for how long the main thread has been waiting. Meanwhile it
answers other ranks that ask who is missing, so that those who wait are told from those who have
stopped; when the deadline passes it asks that itself, and ends this process with the answer.
"""

from __future__ import annotations

import sys
import threading
import time

from ktrainer.errors import DeadlineExceeded
from ktrainer.world.base import World

_LOOK_SECONDS = 0.1


class Watch:
    """Watches the waits of one rank, from `begin` to `end`; they may overlap.

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
        """A wait begins."""
        with self._lock:
            self._waits += 1
            if self._waits == 1:
                self._since = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(None, self._run, "ktrainer-watch", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """A wait has ended."""
        with self._lock:
            self._waits = max(0, self._waits - 1)
            if not self._waits:
                self._since = None

    def forget(self) -> None:
        """No wait is under way: an error has ended them all."""
        with self._lock:
            self._waits, self._since = 0, None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
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
        """Raise where nobody catches, which ends all ranks: see `ktrainer.world.mpi`."""
        if self._since != since:
            return  # it came at last
        error = DeadlineExceeded(self.world.rank, self.world.step, self.what, deadline, others)
        sys.excepthook(type(error), error, None)
