"""Feeds over a source, and the cursor that says where they stand in it."""

from __future__ import annotations

import itertools
import struct
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.data.batch_source import Piece, Source, close_iterator
from ktrainer.data.data_agreement import agreed_spec
from ktrainer.data.feed import Feed, limited
from ktrainer.data.local_batch import LocalBatch
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.distributed.world import World

_POSITION = struct.Struct("<qq")  # what a state begins with: epoch and batches taken


class SourceFeed(Feed):
    """Local batches of a source; the base of per-replica and replicated feeds.

    Args:
        source: where the batches come from.
        world: the ranks that are fed.
        training: an endless source continues from epoch to epoch, instead of starting over.
    """

    def __init__(
        self,
        source: Source,
        *,
        world: World,
        limit: int | float | None,
        training: bool,
        source_batches: int | None,
    ) -> None:
        self.source, self.world = source, world
        self.spec = agreed_spec(world, source.spec)
        self.source_batches = source_batches
        self.num_batches = self.pass_batches = limited(source_batches, limit)
        source.reads_whole = self.num_batches == source_batches
        self._cursor = Cursor(source, limit=self.num_batches, restart=not training)
        self._repeats = False
        self._first: list[LocalBatch] | None = None  # the first epoch, if all others repeat it

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        return self._first_again(epoch, skip) if self._repeats else super().epoch(epoch, skip)

    def repeat_first_epoch(self) -> None:
        self._repeats = True

    def _first_again(self, epoch: int, skip: int) -> Iterator[LocalBatch]:
        if self._first is None:  # kept: what shuffles, or never begins again, has them only once
            if self.world.is_root and self.source.unseeded and (skip or epoch > self.first_epoch):
                warnings.warn(
                    "trainer.overfit_batches: the first batches were read again for this resume. "
                    "They are those of before only if each run reads the data in the same order: "
                    "if it is shuffled, give the shuffle a seed",
                    stacklevel=2,
                )
            self._first = [_kept(batch) for batch in self.read(0)]
            self.exhausted = False
        yield from self._first[skip:]

    @property
    def shuffle_order(self) -> ShuffleOrder | None:
        return self.source.order  # with what was drawn

    def set_shuffle_order(self, order: ShuffleOrder) -> None:
        if self.source.shuffle(order):
            self._cursor.drop_peeked()

    def pass_state(self, inside_pass: bool) -> bytes | None:
        if not self._repeats:
            return self._cursor.state(inside_pass)
        # Others say where the one pass has ended, not how it began.
        return self._cursor.state(True) if self.source.state_of_opening else None

    def resume_from(self, state: bytes) -> None:
        self._cursor.resume_from(state)

    def read_up_to(self, epoch: int, skip: int) -> None:
        batches = (epoch - self.first_epoch) * (self.pass_batches or 0) + skip
        if batches and self._repeats:
            batches = self.pass_batches or 0
        if batches and not self.source.reopens:
            self._cursor.drop_peeked()  # else its thread would pass over them
            self.source.use(batches)
        elif self.source.shuffles and self.source.reorders and not self.source.endless:
            self._replay_epochs(epoch - self.first_epoch, skip)

    def _replay_epochs(self, epochs: int, skip: int) -> None:
        """Draw the seeds that shuffles drew in these epochs before the resume, so that a later call
        on the same data has the orders of an uninterrupted script."""
        source = self.source
        if self._repeats:
            epochs, skip = min(1, epochs + skip), 0
        elif self.batches_per_epoch is not None:
            epochs, skip = self._locate(epochs, skip)
        if passes := epochs + (skip > 0):
            self._cursor.drop_peeked()
            # `Model.fit` opens a pass once more when all of it was read.
            last = source.openings if source.reads_whole and not skip else 1
            source.replay_passes(passes, (passes - 1) * source.openings + last)

    def replay_passes(self, passes: int) -> None:
        source = self.source
        for _ in range(0 if source.reopens else passes):
            deque(itertools.islice(self._cursor.start(0, 0), self.pass_batches), 0)
        if passes and source.shuffles:
            self._cursor.drop_peeked()
            openings = source.openings if source.reads_whole else 1
            source.replay_passes(passes, passes * openings)

    def slow_stage(self) -> str | None:
        return self.source.slow_stage()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        with self.source.paused(timeout) as problem:
            yield problem

    def close(self) -> None:
        super().close()
        self._cursor.close()
        self._first = None


class Cursor:
    """The position in a source: opens it there, continues an endless one, returns peeked batches.

    Args:
        source: where the batches come from.
        limit: batches an epoch of an endless source, if set.
        restart: whether every epoch of an endless source that can be reopened starts at its
            beginning (evaluation), instead of continuing (training).
    """

    def __init__(self, source: Source, *, limit: int | None, restart: bool) -> None:
        self.source, self._limit, self._restart = source, limit, restart
        self._live: Iterator[Piece] | None = None
        self._epoch = self._position = 0  # batches taken of that epoch, or of an endless stream
        self._under_way = False  # whether some of that epoch is left
        self._peeked: tuple[Piece | None, Iterator[Piece]] | None = None
        self._known: tuple[int, int, bytes] | None = None  # a position, and the source's state

    def state(self, inside_epoch: bool) -> bytes | None:
        """The position, if the source knows more of it than the number of batches taken.

        Args:
            inside_epoch: whether an epoch is under way; between two, only an endless stream has a
                position, and what the next epoch's order depends on. One that was opened is that
                next epoch until its first update is made.
        """
        if self._known is not None:  # nothing was read since
            return _POSITION.pack(*self._known[:2]) + self._known[2]
        if self._under_way and not inside_epoch and self.source.state_of_opening:
            at, state = (self._epoch, 0), self.source.state()  # before its first update
        elif not self._position:
            return None
        elif inside_epoch or self.source.endless:
            at, state = (self._epoch, self._position), self.source.state()
        else:
            at, state = (self._epoch + 1, 0), self.source.state_between()
        return None if state is None else _POSITION.pack(*at) + state

    def resume_from(self, state: bytes) -> None:
        """Start from `state` at the next `start`, if it is at the same position."""
        self._known = *_POSITION.unpack_from(state), state[_POSITION.size :]

    def peek(self) -> Piece | None:
        """The very first batch that epoch 0 will give, or one like it; None if there is none."""
        if (piece := self.source.look()) is not None:
            return piece
        if self._peeked is None:
            pieces = self.source.open(0, 0)
            self._peeked = next(pieces, None), pieces
        return self._peeked[0]

    def start(self, epoch: int, skip: int) -> Iterator[Piece]:
        """The batches of `epoch` after the first `skip`; an endless source has no end of epoch."""
        source, position = self.source, skip
        if source.endless and epoch and not self._restart:
            position = skip + epoch * self._limit if self._limit else self._position
        stream = source.endless and not source.indexed
        if not self._knows(0 if stream else epoch, position):
            self._known = None
        if self._known is not None:
            pieces = self._reopen(0 if stream else epoch, position, self._known[2])
            self._live = pieces if stream else None
        elif stream:
            pieces = self._seek(position)
        elif epoch == 0 and (position == 0 or self._peeked_order()):
            pieces = self._take_peeked(position)
        else:
            pieces = self._reopen(epoch, position)
        self._epoch, self._position = 0 if stream else epoch, position
        self._under_way = True
        return self._counted(pieces, keep_open=stream)

    def _knows(self, epoch: int, position: int) -> bool:
        """Return whether the state to resume from is that of a position: one of how an epoch began
        is that of all positions in it."""
        if self._known is None or self._known[0] != epoch:
            return False
        return self.source.state_of_opening or 0 < position == self._known[1]

    def pass_over(self, epoch: int) -> None:
        """Go through an epoch of which nothing is left, if the next one's order depends on it."""
        known = self._known
        if known is not None and known[0] == epoch and self.source.state_between() is not None:
            pieces = self.start(epoch, known[1])
            next(pieces, None)
            close_iterator(pieces)

    def _peeked_order(self) -> bool:
        """Return whether the peeked batch has drawn the order: opened once more, a shuffle would
        draw another one."""
        return self.source.reorders and self._peeked is not None

    def _take_peeked(self, skip: int = 0) -> Iterator[Piece]:
        if self._peeked is None:
            return self.source.open(0, skip)
        (first, rest), self._peeked = self._peeked, None
        return _put_back(first, rest, skip)

    def _reopen(self, epoch: int, skip: int, state: bytes | None = None) -> Iterator[Piece]:
        self.drop_peeked()
        if state is not None:
            return self.source.open_at(epoch, skip, state)
        return self.source.open(epoch, skip)

    def _seek(self, position: int) -> Iterator[Piece]:
        peeked = self.source.shuffles and self._peeked_order()
        from_begin = position == 0 or not self.source.reopens or peeked
        if self._live is None and from_begin:
            self._live, self._position = self._take_peeked(), 0
        elif self._live is None or (
            position < self._position and (self.source.reopens or self._restart)
        ):
            close_iterator(self._live)
            self._live, self._position = self._reopen(0, position), position
        while self._position < position and (piece := next(self._live, None)) is not None:
            self._position += self.source.take(piece)
        return self._live

    def _counted(self, pieces: Iterator[Piece], keep_open: bool) -> Iterator[Piece]:
        # A stream stays open when this is closed: the next epoch continues it.
        try:
            for piece in pieces:
                self._known = None
                if not self.source.take(piece):
                    continue
                self._position += 1
                self._under_way = self._position != self._limit
                yield piece
            self._known, self._under_way = None, False
        finally:
            if not keep_open:
                close_iterator(pieces)

    def drop_peeked(self) -> None:
        """Drop the peeked batch: the source is opened again at its next use."""
        if self._peeked is not None:
            self.source.drop_peeked(self._peeked[1])
            self._peeked = None

    def close(self) -> None:
        """Close the source."""
        self.drop_peeked()
        close_iterator(self._live)
        self._live = None
        self.source.close()


def _kept(batch: LocalBatch) -> LocalBatch:
    """A batch that keeps no larger array in memory of which it is a part."""

    def copied(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, np.ndarray) and leaf.base is not None else leaf

    return replace(batch, batch=tf.nest.map_structure(copied, batch.batch))


def _put_back(first: Piece | None, rest: Iterator[Piece], skip: int) -> Iterator[Piece]:
    try:
        if first is not None:
            yield from itertools.islice(itertools.chain([first], rest), skip, None)
    finally:
        close_iterator(rest)
