"""Replicated feed: every rank runs the whole source, and each replica takes its slice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

from ktrainer.data.batch_source import Piece, Source, describe
from ktrainer.data.batch_specs import fits, spec_of, widen
from ktrainer.data.data_agreement import (
    ENDED,
    FAILED,
    HAS_BATCH,
    call_on_all_ranks,
    exchange,
    raise_failed,
    raise_other_rows,
    raise_uneven,
)
from ktrainer.data.local_batch import LocalBatch, bounds, leaf_names
from ktrainer.data.source_feed import SourceFeed
from ktrainer.distributed.world import World


class ReplicatedFeed(SourceFeed):
    """Local batches of a source whose batches are the global ones, the same on all ranks.

    If the length is known, ranks compare their first batch of every epoch. If not, they exchange
    before every step whether they have a batch, and which: if the data of a rank ends early, or
    differs, all ranks raise instead of waiting.

    Args:
        source: yields this replica's slices.
        world: all ranks.
        limit: batches an epoch, or a fraction of them.
        training: an endless source continues from epoch to epoch, instead of starting over.
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
        length = source.num_batches
        super().__init__(source, world=world, limit=limit, training=training, source_batches=length)
        self.infinite, self._check = source.infinite, check
        self._fingerprinted = False

    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        if self.pass_batches is not None and skip >= self.pass_batches:
            self._cursor.pass_over(epoch)
            return
        pieces = self._cursor.start(epoch, skip)
        with closing(cast(Any, pieces)):
            always = self.source.num_batches is None and not self.source.infinite
            if self.world.size > 1 and (self._check or always):
                pieces = self._compared(pieces, epoch, skip, always)
            replica, replicas = self.world.replica, self.world.replicas
            remaining = -1 if self.pass_batches is None else self.pass_batches - skip
            for piece in pieces:
                if not self.source.checked and not fits(piece.batch, self.spec):
                    self.spec = widen(self.spec, spec_of(piece.batch))
                start, stop = bounds(piece.rows, replica, replicas)
                yield LocalBatch(piece.batch, stop - start, piece.rows)
                remaining -= 1
                if remaining == 0:
                    return
        self.exhausted = not self.source.reopens

    def _compared(
        self, pieces: Iterator[Piece], epoch: int, skip: int, always: bool
    ) -> Iterator[Piece]:
        """`pieces`, the first of which, or each, is compared between ranks."""
        compare = always or not (self._fingerprinted and (epoch, skip) == (0, 0))
        batch = skip
        while True:
            try:
                piece = next(pieces, None)
            except Exception:
                if compare:  # the others wait for this rank's answer
                    self._exchange(FAILED, None)
                raise
            if compare:
                self._compare(piece, epoch, batch)
            if piece is None:
                return
            yield piece
            batch, compare = batch + 1, always

    def _compare(self, piece: Piece | None, epoch: int, batch: int) -> None:
        table = self._exchange(ENDED if piece is None else HAS_BATCH, piece)
        raise_failed(table[:, 0])
        if len(set(table[:, 0].tolist())) > 1:
            raise_uneven(self.world, table[:, 0], batch)
        where = f"batch {batch} of epoch {epoch}"
        raise_other_rows(self.world, table[:, 1:], leaf_names(self.spec), where)

    def _exchange(self, state: int, piece: Piece | None) -> Any:
        """Every rank's state, number of rows, and digests of leaves."""
        row = [state, piece.rows if piece else 0, *(piece.digests if piece and self._check else ())]
        width = 2 + len(leaf_names(self.spec))
        return exchange(self.world, (row + [0] * width)[:width], "agree on the next batch")

    @property
    def state_is_common(self) -> bool:
        return self.source.state_of_opening

    def peek(self, rows: int) -> Any:
        piece = call_on_all_ranks(self.world, self._cursor.peek)
        return None if piece is None else piece.batch

    def fingerprint(self) -> dict[str, str]:
        length = self.source.num_batches
        facts = {
            "structure": describe(self.source.spec),
            "length": "unknown" if length is None else f"{length} batches",
        }
        if self.world.size == 1:
            return facts
        # A look that opens no epoch says nothing of the first batch that is trained on.
        self._fingerprinted = self.source.look() is None
        if (piece := call_on_all_ranks(self.world, self._cursor.peek)) is not None:
            facts["first batch/rows"] = str(piece.rows)
            names = leaf_names(self.spec)
            for name, digest in zip(names, piece.digests, strict=True):
                facts[f"first batch/{name}"] = f"{digest:016x}"
        return facts
