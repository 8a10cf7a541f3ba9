"""Where a feed stands in its source."""

from __future__ import annotations

from collections.abc import Iterator

from ktrainer.feed.source import Piece, Source


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
        self._position = 0
        self._peeked: tuple[Piece | None, Iterator[Piece]] | None = None

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
        if source.endless and not source.indexed:
            return self._seek(place)
        return self._take_peeked() if (epoch, place) == (0, 0) else self._reopen(epoch, place)

    def _take_peeked(self) -> Iterator[Piece]:
        if self._peeked is None:
            return self.source.open(0, 0)
        (first, rest), self._peeked = self._peeked, None
        return _put_back(first, rest)

    def _reopen(self, epoch: int, skip: int) -> Iterator[Piece]:
        self._drop_peeked()
        return self.source.open(epoch, skip)

    def _seek(self, place: int) -> Iterator[Piece]:
        if self._live is None and (place == 0 or not self.source.reopens):
            self._live, self._position = self._take_peeked(), 0
        elif self._live is None or (place < self._position and self.source.reopens):
            _close(self._live)
            self._live, self._position = self._reopen(0, place), place
        while self._position < place and next(self._live, None) is not None:
            self._position += 1
        return self._counted(self._live)

    def _counted(self, live: Iterator[Piece]) -> Iterator[Piece]:
        # Closing this one leaves `live` open: the next epoch goes on with it.
        for piece in live:
            self._position += 1
            yield piece

    def _drop_peeked(self) -> None:
        if self._peeked is not None:
            _close(self._peeked[1])
            self._peeked = None

    def close(self) -> None:
        """Let go of the source."""
        self._drop_peeked()
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
