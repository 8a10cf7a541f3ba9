"""Where a feed stands in its source."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ktrainer.feed.source import Piece, Source

_PLACE = struct.Struct("<qq")  # what a state begins with: epoch and batches taken


class Cursor:
    """Opens a source at a place, goes on with an endless one, and hands on a peeked batch.

    Args:
        source: where the batches come from.
        limit: batches an epoch of an endless source, if set.
        fresh: whether every epoch of an endless source that can be opened again begins at its
            beginning (evaluation), instead of going on (training).
    """

    def __init__(self, source: Source, *, limit: int | None, fresh: bool) -> None:
        self.source, self._limit, self._fresh = source, limit, fresh
        self._live: Iterator[Piece] | None = None
        self._epoch = self._position = 0  # batches taken of that epoch, or of an endless stream
        self._peeked: tuple[Piece | None, Iterator[Piece]] | None = None
        self._known: tuple[int, int, bytes] | None = None  # a place, and the source's state there

    def state(self, inside_epoch: bool) -> bytes | None:
        """Where the batches stand, if the source can tell more than how many were taken.

        Args:
            inside_epoch: whether an epoch is under way; between two, only an endless stream stands
                anywhere.
        """
        if not (self._position and (inside_epoch or self.source.endless)):
            return None
        state = self.source.state()
        return None if state is None else _PLACE.pack(self._epoch, self._position) + state

    def go_on_from(self, state: bytes) -> None:
        """Let the next `start`, if it is at the place of `state`, begin with that."""
        self._known = *_PLACE.unpack_from(state), state[_PLACE.size :]

    def peek(self) -> Piece | None:
        """The very first batch that epoch 0 will give, or None if there is none."""
        if self._peeked is None:
            pieces = self.source.open(0, 0)
            self._peeked = next(pieces, None), pieces
        return self._peeked[0]

    def start(self, epoch: int, skip: int) -> Iterator[Piece]:
        """The batches of `epoch` after the first `skip`; an endless source has no end of epoch."""
        source, place = self.source, skip
        if source.endless and epoch and not self._fresh:
            place = skip + epoch * self._limit if self._limit else self._position
        stream = source.endless and not source.indexed
        known, self._known = self._known, None
        if known is not None and known[:2] == (0 if stream else epoch, place):
            pieces = self._reopen(*known)
            self._live = pieces if stream else None
        elif stream:
            pieces = self._seek(place)
        elif epoch == 0 and (place == 0 or (source.reorders and self._peeked is not None)):
            # Not opened once more: a shuffle would draw another order.
            pieces = self._take_peeked()
            for _ in range(place):
                next(pieces, None)
        else:
            pieces = self._reopen(epoch, place)
        self._epoch, self._position = 0 if stream else epoch, place
        return self._counted(pieces, keep_open=stream)

    def _take_peeked(self) -> Iterator[Piece]:
        if self._peeked is None:
            return self.source.open(0, 0)
        (first, rest), self._peeked = self._peeked, None
        return _put_back(first, rest)

    def _reopen(self, epoch: int, skip: int, state: bytes | None = None) -> Iterator[Piece]:
        self.drop_peeked()
        if state is not None:
            return self.source.open_at(epoch, skip, state)
        return self.source.open(epoch, skip)

    def _seek(self, place: int) -> Iterator[Piece]:
        if self._live is None and (place == 0 or not self.source.reopens):
            self._live, self._position = self._take_peeked(), 0
        elif self._live is None or (place < self._position and self.source.reopens):
            _close(self._live)
            self._live, self._position = self._reopen(0, place), place
        while self._position < place and next(self._live, None) is not None:
            self._position += 1
        return self._live

    def _counted(self, pieces: Iterator[Piece], keep_open: bool) -> Iterator[Piece]:
        # A stream stays open when this is closed: the next epoch goes on with it.
        try:
            for piece in pieces:
                self._position += 1
                yield piece
        finally:
            if not keep_open:
                _close(pieces)

    def drop_peeked(self) -> None:
        """Open the source again, as after its order has changed."""
        if self._peeked is not None:
            _close(self._peeked[1])
            self._peeked = None

    def close(self) -> None:
        """Let go of the source."""
        self.drop_peeked()
        _close(self._live)
        self._live = None
        self.source.close()


def _put_back(first: Piece | None, rest: Iterator[Piece]) -> Iterator[Piece]:
    try:
        if first is not None:
            yield first
            yield from rest
    finally:
        _close(rest)


def _close(iterator: Iterator[Piece] | None) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
