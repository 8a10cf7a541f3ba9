"""A feed over a source that every rank runs in full; each replica takes its slice of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, cast

from ktrainer.feed.agree import (
    ENDED,
    FAILED,
    HAS_BATCH,
    agreed_spec,
    exchange,
    raise_failed,
    raise_other_rows,
    raise_uneven,
    together,
)
from ktrainer.feed.cursor import Cursor
from ktrainer.feed.share import Feed, Share, bounds, leaf_names, limited
from ktrainer.feed.shuffling import ShuffleOrder
from ktrainer.feed.source import Piece, Source
from ktrainer.feed.specs import fits, spec_of, widen
from ktrainer.world.base import World


class StreamFeed(Feed):
    """Shares of a source whose batches are the global ones, the same on all ranks.

    Where the length is known, ranks compare their first batch of every epoch. Where it is not,
    they tell each other before every step whether they have a batch, and which: a rank whose data
    ends early, or differs, makes all ranks raise instead of wait.

    Args:
        source: yields this replica's slices.
        world: who else takes slices.
        limit: batches an epoch, or a fraction of them.
        training: an endless source goes on from epoch to epoch, instead of beginning anew.
        check: compare batches between ranks.
    """

    def __init__(
        self,
        source: Source,
        *,
        world: World,
        limit: int | float | None,
        training: bool,
        check: bool = True,
    ) -> None:
        self.source, self.world, self._check = source, world, check
        self.spec = agreed_spec(world, source.spec)
        self.source_batches = source.num_batches
        self.num_batches = self.pass_batches = limited(self.source_batches, limit)
        self.infinite = source.infinite
        self._cursor = Cursor(source, limit=self.num_batches, fresh=not training)
        self._fingerprinted = False

    def read(self, epoch: int, skip: int = 0) -> Iterator[Share]:
        if self.pass_batches is not None and skip >= self.pass_batches:
            return
        pieces = self._cursor.start(epoch, skip)
        with closing(cast(Any, pieces)):
            if self.world.size > 1:
                pieces = self._watched(pieces, epoch, skip)
            replica, replicas = self.world.replica, self.world.replicas
            left = -1 if self.pass_batches is None else self.pass_batches - skip
            for piece in pieces:
                if not self.source.checked and not fits(piece.batch, self.spec):
                    self.spec = widen(self.spec, spec_of(piece.batch))
                start, stop = bounds(piece.rows, replica, replicas)
                self.shuffle_order = self.source.order  # with what was drawn
                yield Share(piece.batch, stop - start, piece.rows)
                left -= 1
                if left == 0:
                    return
        self.exhausted = not self.source.reopens

    def _watched(self, pieces: Iterator[Piece], epoch: int, skip: int) -> Iterator[Piece]:
        """`pieces`, compared between ranks as far as that is needed."""
        unknown = self.source.num_batches is None and not self.source.infinite
        if not self._check and not unknown:
            return pieces
        return self._compared(pieces, epoch, skip, always=unknown)

    def _compared(
        self, pieces: Iterator[Piece], epoch: int, skip: int, always: bool
    ) -> Iterator[Piece]:
        batch, names = skip, leaf_names(self.spec)
        compare = always or not (self._fingerprinted and (epoch, skip) == (0, 0))
        while True:
            piece = self._next(pieces, compare)
            if compare:
                row = [ENDED, 0] if piece is None else [HAS_BATCH, piece.rows]
                digests = list(piece.digests) if piece and self._check else []
                width = 2 + len(names)
                table = exchange(
                    self.world, (row + digests + [0] * width)[:width], "agree on the next batch"
                )
                raise_failed(table[:, 0])
                if len(set(table[:, 0].tolist())) > 1:
                    raise_uneven(self.world, table[:, 0], batch)
                where = f"batch {batch} of epoch {epoch}"
                raise_other_rows(self.world, table[:, 1:], names, where)
            if piece is None:
                return
            yield piece
            batch, compare = batch + 1, always

    def _next(self, pieces: Iterator[Piece], compare: bool) -> Piece | None:
        try:
            return next(pieces, None)
        except Exception:
            if compare:  # the others wait for this rank's answer
                row = [FAILED] + [0] * (1 + len(leaf_names(self.spec)))
                exchange(self.world, row, "agree on the next batch")
            raise

    def peek(self, rows: int) -> Any:
        piece = together(self.world, self._cursor.peek)
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
        length = self.source.num_batches
        facts = {
            "structure": self.source.structure(),
            "length": "unknown" if length is None else f"{length} batches",
        }
        if self.world.size == 1:
            return facts
        self._fingerprinted = True
        if (piece := together(self.world, self._cursor.peek)) is not None:
            facts["first batch/rows"] = str(piece.rows)
            names = leaf_names(self.spec)
            for name, digest in zip(names, piece.digests, strict=True):
                facts[f"first batch/{name}"] = f"{digest:016x}"
        return facts

    def close(self) -> None:
        super().close()
        self._cursor.close()
