"""Feed of rows that can be read by index: each replica reads its own rows only."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ktrainer.data.feed import Feed, limited
from ktrainer.data.local_batch import LocalBatch, bounds
from ktrainer.data.prefetch_thread import Prefetcher, on_device, prefetched
from ktrainer.data.shuffling import Order, ShuffleOrder
from ktrainer.distributed.world import World


class Rows(ABC):
    """Examples by index, which every rank can read.

    Attributes:
        count: how many there are.
        spec: nested specs of a batch of them, the batch dimension None.
        draws: whether reading draws random numbers, from the generator of `(seed, epoch, row)`.
        fingerprint_reads: whether the fingerprint is of rows that are read for it, by code of the
            user's.
    """

    count: int
    spec: Any
    draws: bool = False
    fingerprint_reads: bool = False

    @abstractmethod
    def take(self, where: slice | np.ndarray, order: ShuffleOrder, epoch: int) -> Any:
        """The rows at these indices, or in this slice, as a batch."""

    @abstractmethod
    def is_slow(self, rows: int) -> bool:
        """Return whether so many rows are better read by another thread, ahead of time."""

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Properties of the rows that must be the same on every rank, by name."""

    def slow_stage(self) -> str | None:
        """The stage that takes most: see `Feed.slow_stage`."""
        return None

    def close(self) -> None:  # noqa: B027 - arrays hold nothing that needs closing
        """Stop background work. May be called twice."""


class IndexedFeed(Feed):
    """Local batches of rows that are read by index.

    Which rows a rank reads is a pure function of `(order, epoch, batch, replica)`: there is no
    state, and any batch is the first one to be read. `global_batch` rows make a step; the last
    step of an epoch may have fewer.

    Args:
        rows: the rows, the same on all ranks.
        world: all ranks.
        global_batch: rows a step, over all replicas.
        shuffle: whether to reorder the rows; "batch": those of each batch only.
        order: the order they are drawn in; the same on all ranks.
        limit: batches an epoch, or a fraction of them.
        drop_remainder: skip a last, smaller batch.
        prefetch: batches read ahead when reading is slow; 0 never does.
        device: where batches that are read ahead are copied to; None: nowhere.
    """

    shuffle_order: ShuffleOrder | None = None

    def __init__(
        self,
        rows: Rows,
        *,
        world: World,
        global_batch: int,
        shuffle: bool | str = False,
        order: ShuffleOrder | None = None,
        limit: int | float | None = None,
        drop_remainder: bool = False,
        prefetch: int = 2,
        device: str | None = None,
    ) -> None:
        self._device = device
        self._source, self.rows, self.spec = rows, rows.count, rows.spec
        self.replica, self.replicas = world.replica, world.replicas
        self._alone = world.size == 1 and not world.alone  # else it will join others
        self.global_batch, self.shuffle = global_batch, shuffle
        self.shuffle_order = (order or ShuffleOrder()) if shuffle or rows.draws else None
        self._keras_order: Order | None = None
        steps = self.rows // global_batch, -(-self.rows // global_batch)
        self.source_batches = steps[0] if drop_remainder else steps[1]
        self.num_batches = self.pass_batches = limited(self.source_batches, limit)
        largest = math.ceil(min(global_batch, self.rows) / self.replicas)
        self._ahead = prefetch if rows.is_slow(largest) else 0
        self._prefetcher: Prefetcher | None = None

    def set_shuffle_order(self, order: ShuffleOrder) -> None:
        self.shuffle_order, self._keras_order = order, None

    def order(self, epoch: int) -> Order | None:
        """The rows in the order of `epoch`; None for their own order."""
        if self.shuffle_order is None or not self.shuffle:
            return None
        if self._keras_order is not None:
            return self._keras_order
        within = self.shuffle == "batch"
        order = self.shuffle_order.rows(epoch, self.rows, self.global_batch, within)
        if self.shuffle_order.keras:  # the same in every epoch; drawing it takes a while
            self._keras_order = order
        return order

    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        batches = self._local_batches(epoch, skip)
        return self._prefetched(batches) if self._ahead else batches

    def _prefetched(self, batches: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
        self._stop()
        copy = self._copied if self._device else None
        self._prefetcher = prefetched(batches, self._ahead, "rows", copy)
        try:
            yield from self._prefetcher
        finally:
            self._stop()

    def _copied(self, local: LocalBatch) -> LocalBatch:
        assert self._device is not None
        return replace(local, batch=on_device(local.batch, self._device))

    def _local_batches(self, epoch: int, skip: int) -> Iterator[LocalBatch]:
        order, take, drawn = self.order(epoch), self._source.take, self.shuffle_order
        drawn = drawn or ShuffleOrder()
        assert self.pass_batches is not None
        for index in range(skip, self.pass_batches):
            first = index * self.global_batch
            total = min(self.global_batch, self.rows - first)
            start, stop = bounds(total, self.replica, self.replicas)
            examples = stop - start
            if not examples:
                start, stop = 0, 1  # padding: a row of this very batch
            where = slice(first + start, first + stop)
            batch = take(where if order is None else order[where], drawn, epoch)
            yield LocalBatch(batch, examples, total)

    def slow_stage(self) -> str | None:
        return self._source.slow_stage()

    @contextmanager
    def paused(self, timeout: float) -> Iterator[str | None]:
        if self._prefetcher is None:
            yield None
            return
        with self._prefetcher.paused(timeout) as rests:
            yield None if rests else f"a batch of its data takes more than {timeout:g} s to read"

    def peek(self, rows: int) -> Any:
        # Spread over all of them: neighbours may be alike.
        where = np.unique(np.linspace(0, self.rows - 1, min(rows, self.rows)).astype(np.int64))
        return self._source.take(where, self.shuffle_order or ShuffleOrder(), 0)

    def fingerprint(self) -> dict[str, str]:
        order = "in order" if self.shuffle_order is None else str(self.shuffle_order)
        facts = {"length": f"{self.rows} rows", "order": order}
        if self._alone and self._source.fingerprint_reads:  # there is nothing to compare with
            return facts
        return self._source.fingerprint() | facts

    def close(self) -> None:
        super().close()
        self._stop()
        self._source.close()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
