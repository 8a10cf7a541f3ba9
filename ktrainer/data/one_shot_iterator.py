"""Iterators that can be read only once, such as generators, where several calls read them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from ktrainer.data.data_arguments import copied


class OneShotReader:
    """Reads an iterator of the user's, which stays open, for one pass of a call of `fit`,
    `evaluate` or `predict`.

    Items that were read ahead and not used are there for the next reader, so where a pass begins
    depends on what those before it have used, and not on their threads. It leaves out one item, as
    `Model.fit` does: Keras reads at least one ahead, and loses it.

    Args:
        data: an iterator of the user's; `iter` is called on it once, by the first reader.
        again: items that come first.

    Attributes:
        begin: the number of the first item.
        end: how many items are used if the newest one is.
    """

    def __init__(self, data: Iterator[Any], again: Iterable[Any] = ()) -> None:
        self._shared, self._again = _shared_by(data), deque(again)
        self._iterator = self._shared.held[1] if self._shared.held else data
        self.begin = self._next = self._shared.used + 1 if self._shared.used else 0
        self.end = self.begin - len(self._again)
        self._token = self._shared.newest = object()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._again:
            self.end += 1
            return self._again.popleft()
        number, item = self._shared.read(self._next, self._iterator)
        self.end = self._next = number + 1
        return item

    def use(self, end: int) -> bool:
        """Count so many items as used, read or not; return False if another reader has used them
        since this one read them."""
        shared = self._shared
        if shared.newest is not self._token and end <= shared.used:
            return False
        shared.newest, shared.used = self._token, max(shared.used, end)
        return True


class _Shared:
    """The state of an iterator that its readers share.

    Attributes:
        items: read and not known to be used, from number `first` on.
        used: how many items are used; unread ones are passed over by the next read.
        newest: a token of the reader that was made last, or has used some since.
        error: of the iterator after these items; each reader that comes to it raises it.
        held: the data and its iterator, where neither may end before this.
    """

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.first = self.used = 0
        self.newest: object = None
        self.error: Exception | None = None
        self.held: tuple[Any, Iterator[Any]] | None = None
        self._reading = threading.Lock()

    def read(self, number: int, iterator: Iterator[Any]) -> tuple[int, Any]:
        """Item `number`, or the first one that is not used if that is later; its number first."""
        with self._reading:  # a thread of the call before may still wait for its item
            while self.first < self.used:
                if self.items:
                    self.items.popleft()
                else:
                    self._next(iterator)
                self.first += 1
            number = max(number, self.first)
            while number - self.first >= len(self.items):
                self.items.append(self._next(iterator))
            return number, self.items[number - self.first]

    def _next(self, iterator: Iterator[Any]) -> Any:
        if self.error is not None:
            raise self.error
        try:
            return copied(next(iterator))
        except StopIteration:
            raise
        except Exception as error:
            self.error = error  # a generator that is asked again just ends
            raise


_every: WeakValueDictionary[int, _Shared] = WeakValueDictionary()  # by the id of the data
_kept: deque[_Shared] = deque(maxlen=8)  # whose data would not keep it


def _shared_by(data: Iterator[Any]) -> _Shared:
    """The state of an iterator, which lives as long; without weak references, as `zip`, or with
    another iterator inside, it is forgotten, with what was read ahead, after eight more of them."""
    if (shared := _every.get(id(data))) is not None:
        return shared
    iterator, shared = iter(data), _Shared()
    _every[id(data)] = shared
    if iterator is data:
        with suppress(TypeError):
            weakref.finalize(data, id, shared).atexit = False  # keeps its argument until then
            return shared
    shared.held = data, iterator
    _kept.append(shared)
    return shared
