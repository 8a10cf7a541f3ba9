"""Per-replica feed: sources that differ from replica to replica, in rows and in length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np

from ktrainer.data.batch_source import Piece, Source, describe
from ktrainer.data.batch_specs import fits, padding_row, spec_of, widen
from ktrainer.data.data_agreement import (
    ENDED,
    FAILED,
    HAS_BATCH,
    agreed_spec,
    exchange,
    first_ranks,
    raise_failed,
    raise_other_replica,
)
from ktrainer.data.local_batch import LocalBatch, first_rows, has_examples, leaf_names
from ktrainer.data.source_feed import SourceFeed
from ktrainer.distributed.world import World


class PerReplicaFeed(SourceFeed):
    """Local batches of a source that belongs to this replica alone.

    Before every step the ranks exchange, in one message, how many rows each one has. A rank that
    ran out of data continues with padding of weight zero until all have: no rank waits for another,
    and every row of every rank is used once an epoch. Ranks of one replica must have the same
    batches, which are counted once; that is compared in the same message.

    Args:
        source: the batches of this replica, the same on all of its ranks.
        world: all ranks.
        limit: batches an epoch, or a fraction of those of the rank that has most.
        training: an endless source continues from epoch to epoch, instead of starting over.
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
        longest, self.infinite, self._replica_of = _lengths(world, source)
        super().__init__(
            source, world=world, limit=limit, training=training, source_batches=longest
        )
        self._facts = facts or {}
        self._last_batch: Any = None
        self._pads_whole = False  # as a batch was not one of examples

    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        if self.pass_batches is not None and skip >= self.pass_batches:
            self._cursor.pass_over(epoch)
            return
        remaining = -1 if self.pass_batches is None else self.pass_batches - skip
        failure, pieces = self._open(epoch, skip)
        with closing(cast(Any, pieces)):
            while remaining:
                piece = None
                if failure is None:
                    try:
                        piece = next(pieces, None)
                    except Exception as error:
                        failure = error
                local_batch = self._agree(piece, failure)
                if local_batch is None:
                    break
                yield local_batch
                remaining -= 1
        self.exhausted = remaining != 0 and not self.source.reopens

    def _open(self, epoch: int, skip: int) -> tuple[Exception | None, Iterator[Piece]]:
        try:
            return None, self._cursor.start(epoch, skip)
        except Exception as error:  # reported to the others in the first message
            return error, _no_pieces()

    def _agree(self, piece: Piece | None, failure: Exception | None) -> LocalBatch | None:
        """This rank's batch of the next step; None when every rank has run out."""
        fitting = piece is None or self.source.checked or fits(piece.batch, self.spec)
        state = FAILED if failure else HAS_BATCH if piece else ENDED
        rows = piece.rows if piece else 0
        names = leaf_names(self.spec) if self.world.replicas < self.world.size else []
        digests = list(piece.digests) if piece else []
        row = [int(not fitting), state, rows, *digests, *[0] * len(names)]
        table = exchange(self.world, row[: 3 + len(names)], "agree on the next batch")
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
            return LocalBatch(self._padding(), 0, total)
        self._last_batch = piece.batch
        self._pads_whole = self._pads_whole or not has_examples(piece.batch)
        return LocalBatch(piece.batch, rows, total)

    def _widen(self, piece: Piece | None) -> None:
        """Make the spec cover the batches of all ranks; all ranks call it."""
        mine = self.spec if piece is None else spec_of(piece.batch)
        self.spec = widen(self.spec, agreed_spec(self.world, mine))

    def _padding(self) -> Any:
        """The first row of this rank's last batch, or all of it if one was no batch of examples; a
        row of zeros if it never had one."""
        if self._last_batch is None:
            return padding_row(self.spec)
        return self._last_batch if self._pads_whole else first_rows(self._last_batch, 1)

    def peek(self, rows: int) -> Any:
        piece = self._cursor.peek()
        return None if piece is None else piece.batch

    def fingerprint(self) -> dict[str, str]:
        return {"structure": describe(self.spec), **self._facts}


def _no_pieces() -> Iterator[Piece]:
    yield from ()


def _lengths(world: World, source: Source) -> tuple[int | None, bool, np.ndarray]:
    """Batches an epoch of the rank that has most (None if one does not know), whether any rank's
    source is infinite, and the replica of each rank."""
    known = -1 if source.num_batches is None else source.num_batches
    known = -2 if source.infinite else known
    table = exchange(world, [known, world.replica], "agree on the number of batches")
    lengths, replica_of = table.T
    longest = None if (lengths < 0).any() else int(lengths.max())
    return longest, bool((lengths == -2).any()), replica_of
