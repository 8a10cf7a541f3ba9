"""Iterators that can be read only once, such as generators, where several calls read them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class OneShotReader:
    """Reads an iterator of the user's, which stays open, for one pass of a call of `fit`,
    `evaluate` or `predict`.

    Items that were read ahead and not used are there for the next reader, so where a pass begins
    depends on what those before it have used, and not on their threads. It leaves out one item, as
    `Model.fit` does: Keras reads at least one ahead, and loses it.

    Args:
        iterator: of the user's.
        again: items that come first.

    Attributes:
        end: how many items are used if the newest one is.
    """

    def __init__(self, iterator: Iterator[Any], again: Iterable[Any] = ()) -> None:
        self._iterator, self._shared, self._again = iterator, _shared_by(iterator), deque(again)
        self._next = self._shared.used + 1 if self._shared.used else 0
        self.end = self._next - len(self._again)
        self._shared.newest = self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            self.end += 1
            return self._again.popleft()
        shared = self._shared
        with shared.reading:  # a thread of the call before may still wait for its item
            while shared.items and shared.first < shared.used:
                shared.items.popleft()
                shared.first += 1
            number = max(self._next, shared.first)
            while number - shared.first >= len(shared.items):
                shared.items.append(next(self._iterator))
            self.end = self._next = number + 1
            return shared.items[number - shared.first]

    def use(self, end: int) -> bool:
        """Count so many items as used; return False if another reader has used them since this one
        read them."""
        shared = self._shared
        if shared.newest is not self and end <= shared.used:
            return False
        shared.newest, shared.used = self, max(shared.used, end)
        return True


class _Shared:
    """The state of an iterator that its readers share: `items`, read and not known to be used, from
    number `first` on; how many are `used`; the `newest` reader that was made or has used some."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.first = self.used = 0
        self.reading = threading.Lock()
        self.newest: OneShotReader | None = None
        self.owner: Any = None


_every: dict[int, _Shared] = {}  # by the id of its iterator


def _shared_by(iterator: Iterator[Any]) -> _Shared:
    if (shared := _every.get(id(iterator))) is None:
        shared = _every[id(iterator)] = _Shared()
        try:
            weakref.finalize(iterator, _every.pop, id(iterator), None).atexit = False
        except TypeError:  # as of `zip`: it stays, lest another one gets its id
            shared.owner = iterator
    return shared
