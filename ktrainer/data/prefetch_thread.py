"""Background thread that makes batches ahead of time."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Prefetcher:
    """Iterate over `items` in a background thread, at most `depth` items ahead.

    An exception of `items` is raised again in the consumer, with its own traceback. `close` stops
    the thread, also one that waits for room, and closes a generator in the thread that runs it.

    Args:
        items: what to iterate over.
        depth: items kept ready; at least 1.
        name: of the thread.
    """

    def __init__(self, items: Iterable[Any], depth: int, name: str) -> None:
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._depth = max(1, depth)
        self._stopping = self._done = self._held = self._waits = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(items,), name=f"ktrainer-feed-{name}", daemon=True
        )
        self._thread.start()

    def _run(self, items: Iterable[Any]) -> None:
        iterator: Iterator[Any] | None = None
        try:
            iterator = iter(items)
            for item in iterator:
                if not self._put(item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            # Here, not in `close`: a generator can only be closed by the thread that runs it.
            self._quietly(getattr(iterator, "close", None))
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _put(self, item: Any) -> bool:
        with self._changed:
            self._waits = True
            self._changed.notify_all()
            while (len(self._ready) >= self._depth or self._held) and not self._stopping:
                self._changed.wait()
            self._waits = False
            if self._stopping:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True

    @contextmanager
    def paused(self, timeout: float) -> Iterator[bool]:
        """Compute nothing inside the block; yields whether the thread has stopped in time.

        Args:
            timeout: seconds that the item under way may take.
        """
        with self._changed:
            self._held = True
            idle = self._changed.wait_for(lambda: self._waits or self._done, timeout)
        try:
            yield idle
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _quietly(self, close: Callable[[], None] | None) -> None:
        try:
            if close is not None:
                close()
        except BaseException as error:
            self._error = self._error or error

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            while not self._ready and not self._done:
                self._changed.wait()
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread and wait for it, at most `timeout` seconds. May be called twice."""
        with self._changed:
            self._stopping = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            warnings.warn(
                f"the data source still computes a batch {timeout:g} s after it was closed; its "
                "thread ends when that batch is done",
                stacklevel=2,
            )
