"""A feed over sources that differ from replica to replica, in rows and in length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

import numpy as np

from ktrainer.feed.agree import (
    ENDED,
    FAILED,
    HAS_BATCH,
    agreed_spec,
    exchange,
    first_ranks,
    raise_failed,
    raise_other_replica,
)
from ktrainer.feed.cursor import Cursor
from ktrainer.feed.share import Feed, Share, leaf_names, limited
from ktrainer.feed.shuffling import ShuffleOrder
from ktrainer.feed.source import Piece, Source, describe, take_slice
from ktrainer.feed.specs import fits, spec_of, stand_in, widen
from ktrainer.world.base import World

_WHAT = "agree on the next batch"


class OwnFeed(Feed):
    """Shares of each replica's own batches.

    Before every step the ranks tell each other, in one message, how many rows each one has. A rank
    that ran out of data goes on with stand-in rows of weight zero until all have: none waits for
    another, and every row of every rank is used once an epoch. Ranks of one replica must have the
    same batches, which counts them once; that is compared in the same message.

    Args:
        source: this rank's own batches, the same on all ranks of its replica.
        world: the other ranks.
        limit: batches an epoch, or a fraction of those of the rank that has most.
        training: an endless source goes on from epoch to epoch, instead of beginning anew.
        facts: more of what must be equal on all ranks, for `fingerprint`.
    """

    def __init__(
        self,
        source: Source,
        *,
        world: World,
        limit: int | float | None,
        training: bool,
        facts: dict[str, str] | None = None,
    ) -> None:
        self.source, self.world, self._facts = source, world, facts or {}
        self.spec = agreed_spec(world, source.spec)
        self.source_batches, self.infinite, self._replica_of = _lengths(world, source)
        self.num_batches = self.pass_batches = limited(self.source_batches, limit)
        self._cursor = Cursor(source, limit=self.num_batches, fresh=not training)
        self._blank: Any = None

    def read(self, epoch: int, skip: int = 0) -> Iterator[Share]:
        if self.pass_batches is not None and skip >= self.pass_batches:
            return
        left = -1 if self.pass_batches is None else self.pass_batches - skip
        failure, pieces = self._open(epoch, skip)
        with closing(cast(Any, pieces)):
            while left:
                piece = None
                if failure is None:
                    try:
                        piece = next(pieces, None)
                    except Exception as error:
                        failure = error
                share = self._agree(piece, failure)
                if share is None:
                    break
                self.shuffle_order = self.source.order  # with what was drawn
                yield share
                left -= 1
        self.exhausted = left != 0 and not self.source.reopens

    def _open(self, epoch: int, skip: int) -> tuple[Exception | None, Iterator[Piece]]:
        try:
            return None, self._cursor.start(epoch, skip)
        except Exception as error:  # told to the others in the first message
            return error, _nothing()

    def _agree(self, piece: Piece | None, failure: Exception | None) -> Share | None:
        """This rank's share of the next step; None when every rank has run out."""
        fitting = piece is None or self.source.checked or fits(piece.batch, self.spec)
        state = FAILED if failure else HAS_BATCH if piece else ENDED
        rows = piece.rows if piece else 0
        names = leaf_names(self.spec) if self.world.replicas < self.world.size else []
        digests = list(piece.digests) if piece else []
        row = [int(not fitting), state, rows, *digests, *[0] * len(names)]
        table = exchange(self.world, row[: 3 + len(names)], _WHAT)
        if failure is not None:
            raise failure
        raise_failed(table[:, 1])
        if names:
            raise_other_replica(table[:, 1:], self._replica_of, names)
        total = int(table[first_ranks(self._replica_of), 2].sum())
        if total == 0:
            return None
        if table[:, 0].any():
            self._widen(piece)
        if piece is None:
            return Share(self._stand_in(), 0, total)
        self._blank = piece.batch
        return Share(piece.batch, rows, total)

    def _widen(self, piece: Piece | None) -> None:
        """Make the spec cover the batches of all ranks; all ranks are here."""
        mine = self.spec if piece is None else spec_of(piece.batch)
        self.spec = widen(self.spec, agreed_spec(self.world, mine))

    def _stand_in(self) -> Any:
        """The first row of this rank's last batch, or a row of zeros if it never had one."""
        if self._blank is None:
            return stand_in(self.spec)
        return take_slice(self._blank, 1, 0, 1)

    def peek(self, rows: int) -> Any:
        piece = self._cursor.peek()
        return None if piece is None else piece.batch

    def set_shuffle_order(self, order: ShuffleOrder) -> None:
        if self.source.shuffle(order):
            self._cursor.drop_peeked()
            self.shuffle_order = self.source.order

    def read_state(self, inside_pass: bool) -> bytes | None:
        return self._cursor.state(inside_pass)

    def go_on_from(self, state: bytes) -> None:
        self._cursor.go_on_from(state)

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        with self.source.paused(timeout) as problem:
            yield problem

    def fingerprint(self) -> dict[str, str]:
        return {"structure": describe(self.spec), **self._facts}

    def close(self) -> None:
        super().close()
        self._cursor.close()


def _nothing() -> Iterator[Piece]:
    yield from ()


def _lengths(world: World, source: Source) -> tuple[int | None, bool, np.ndarray]:
    """Batches an epoch of the rank that has most (None if one does not know), whether any never
    runs out, and the replica of each rank."""
    known = -1 if source.num_batches is None else source.num_batches
    known = -2 if source.infinite else known
    table = exchange(world, [known, world.replica], "agree on the number of batches")
    lengths, replica_of = table.T
    longest = None if (lengths < 0).any() else int(lengths.max())
    return longest, bool((lengths == -2).any()), replica_of
