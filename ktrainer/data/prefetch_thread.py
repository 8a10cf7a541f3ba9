"""Background threads that make batches ahead of time, and copy them to an accelerator."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_ON_HOST = (tf.int32, tf.string, tf.variant)  # TensorFlow keeps these in host memory
_CHECKED = 0.1  # seconds between two checks of a wait
_here = threading.local()  # `check`, of the waits in this thread


@contextmanager
def checked_waits(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` while this thread waits for an item, inside the block. It may raise an error to
    end the wait: no item is lost by that."""
    _here.check = check
    try:
        yield
    finally:
        _here.check = None


def check_wait() -> None:
    """Call what `checked_waits` has set for this thread, which may be about to wait."""
    if (check := getattr(_here, "check", None)) is not None:
        check()


class Prefetcher:
    """Iterate over `items` in a background thread, `depth` items ahead; one more waits for room.

    An exception of `items` is raised again in the consumer, with its own traceback. `close` stops
    the thread, also one that waits for room, and closes a generator in the thread that runs it.

    Args:
        items: what to iterate over.
        depth: items kept ready; at least 1.
        name: of the thread.
        skip: how many items to leave out, the first ones.
        checked: whether `checked_waits` applies.
    """

    def __init__(
        self, items: Iterable[Any], depth: int, name: str, skip: int = 0, checked: bool = True
    ) -> None:
        self._checked = checked
        self._ready: deque[Any] = deque()
        self._made: list[Any] = []  # the item that waits for room
        self._changed = threading.Condition()
        self._depth, self._skip = max(1, depth), skip
        self._stopping = self._done = self._held = self._waits = self._close_timed_out = False
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
            if self._skip and not self._stopping:
                self._skip -= 1
                return True
            self._waits, self._made = True, [item]
            self._changed.notify_all()
            while (len(self._ready) >= self._depth or self._held) and not self._stopping:
                self._changed.wait()
            self._waits = False
            if self._stopping:
                return False
            self._ready.append(item)
            self._made = []
            self._changed.notify_all()
            return True

    def pending(self, timeout: float) -> list[Any] | None:
        """The items that were made and not taken, in order, once there is no room for more; also
        after `close`. Nothing is made until one is taken. None if that is not so in time.

        Args:
            timeout: seconds that the item under way may take.
        """

        def rests() -> bool:  # one that has been given room still seems to wait for it
            return self._done or (self._waits and len(self._ready) >= self._depth)

        with self._changed:
            return [*self._ready, *self._made] if self._changed.wait_for(rests, timeout) else None

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
            while not (self._ready or self._done or self._stopping):
                self._changed.wait(_CHECKED if self._checked else None)
                if self._checked:
                    check_wait()
            if self._ready and not self._stopping:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def close(self, timeout: float = 5.0) -> None:
        """Stop the thread and wait for it, at most `timeout` seconds. May be called twice: a
        thread that has not ended in time is not waited for again."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._close_timed_out or self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._close_timed_out = True
            warnings.warn(
                f"the data source still computes a batch {timeout:g} s after it was closed; its "
                "thread ends when that batch is done",
                stacklevel=2,
            )


class _CopyingPrefetcher(Prefetcher):
    """The items of another prefetcher, copied by a thread of its own; two of them ahead.

    Args:
        made: the items.
        copy: what to make of each.
    """

    def __init__(self, made: Prefetcher, copy: Callable[[Any], Any]) -> None:
        self._source = made
        super().__init__(map(copy, made), 1, "device")

    @contextmanager
    def paused(self, timeout: float) -> Iterator[bool]:
        with self._source.paused(timeout) as idle:  # copying calls no code of the user
            yield idle

    def close(self, timeout: float = 5.0) -> None:
        self._source.close(timeout)  # first: the thread of this one may wait for it
        super().close(timeout)


def prefetched(
    items: Iterable[Any],
    depth: int,
    name: str,
    copy: Callable[[Any], Any] | None = None,
    skip: int = 0,
) -> Prefetcher:
    """The items, made ahead; with `copy`, the next two are copied as well, by another thread.

    Args:
        items, depth, name, skip: as for `Prefetcher`.
        copy: what to make of each item.
    """
    made = Prefetcher(items, depth, name, skip)
    return made if copy is None else _CopyingPrefetcher(made, copy)


def on_device(batch: Any, device: str) -> Any:
    """A batch with its numbers copied to a device, once the copies are done.

    Strings, int32 numbers, sparse and ragged tensors stay where they are.
    """

    def copied(leaf: Any) -> Any:
        stays = leaf is None or isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor))
        if stays or tf.as_dtype(leaf.dtype) in _ON_HOST:
            return leaf
        return tf.identity(leaf)

    with tf.device(device):
        return tf.nest.map_structure(copied, batch)
