"""Feed of arrays in memory, sharded by index: each replica gathers its own rows only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from ktrainer.data.data_digests import array_digest
from ktrainer.data.dataset_iterator import packer
from ktrainer.data.feed import Feed, limited
from ktrainer.data.local_batch import (
    LocalBatch,
    bounds,
    leaf_names,
)
from ktrainer.data.prefetch_thread import Prefetcher
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.distributed.world import World
from ktrainer.errors import DataError

# Gathering fewer bytes than this is faster than passing them between threads.
_PREFETCH_BYTES = 1 << 16

Take = Callable[[Any], Any]


class ArrayFeed(Feed):
    """Local batches of arrays that every rank holds in full.

    The order is a pure function of `(order, epoch)`. `global_batch` rows make a step; the last
    step of an epoch may have fewer.

    Args:
        inputs: structure of arrays with equally many rows.
        world: all ranks.
        global_batch: rows a step, over all replicas.
        shuffle: whether to reorder the rows; "batch": those of each batch only.
        order: the order they are drawn in; the same on all ranks.
        limit: batches an epoch, or a fraction of them.
        drop_remainder: skip a last, smaller batch.
        prefetch: batches gathered ahead when they are large; 0 never does.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        world: World,
        global_batch: int,
        shuffle: bool | str = False,
        order: ShuffleOrder | None = None,
        limit: int | float | None = None,
        drop_remainder: bool = False,
        prefetch: int = 2,
    ) -> None:
        leaves = [_convert(leaf) for leaf in tf.nest.flatten(inputs)]
        self.rows = _rows(inputs, leaves)
        self.replica, self.replicas = world.replica, world.replicas
        self.global_batch, self.shuffle = global_batch, shuffle
        self.shuffle_order = (order or ShuffleOrder()) if shuffle else None
        self._structure, self._leaves = inputs, leaves
        self._pack = packer(inputs)
        self._takes = [_taker(leaf) for leaf in leaves]
        self._plain = all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves)
        self.spec = tf.nest.pack_sequence_as(inputs, [_spec(leaf) for leaf in leaves])
        steps = self.rows / global_batch
        self.source_batches = math.floor(steps) if drop_remainder else math.ceil(steps)
        self.num_batches = self.pass_batches = limited(self.source_batches, limit)
        largest = math.ceil(min(global_batch, self.rows) / self.replicas)
        heavy = largest * _row_bytes(leaves, self.rows) > _PREFETCH_BYTES
        self._ahead = prefetch if heavy else 0
        self._prefetcher: Prefetcher | None = None

    def order(self, epoch: int) -> np.ndarray | None:
        """Indices of the rows in the order of `epoch`; None for the order of the arrays."""
        if self.shuffle_order is None:
            return None
        within = self.shuffle == "batch"
        return self.shuffle_order.rows(epoch, self.rows, self.global_batch, within)

    def read(self, epoch: int, skip: int = 0) -> Iterator[LocalBatch]:
        batches = self._local_batches(self.order(epoch), skip)
        return self._prefetched(batches) if self._ahead else batches

    def _prefetched(self, batches: Iterator[LocalBatch]) -> Iterator[LocalBatch]:
        self._stop()
        self._prefetcher = Prefetcher(batches, self._ahead, "arrays")
        try:
            yield from self._prefetcher
        finally:
            self._stop()

    def _local_batches(self, order: np.ndarray | None, skip: int) -> Iterator[LocalBatch]:
        gather, pack, takes = self._gather, self._pack, self._takes
        assert self.pass_batches is not None
        for index in range(skip, self.pass_batches):
            first = index * self.global_batch
            total = min(self.global_batch, self.rows - first)
            start, stop = bounds(total, self.replica, self.replicas)
            examples = stop - start
            if not examples:
                start, stop = 0, 1  # padding: a row of this very batch
            where = gather(order, first + start, first + stop)
            yield LocalBatch(pack([take(where) for take in takes]), examples, total)

    def _gather(self, order: np.ndarray | None, start: int, stop: int) -> Any:
        if order is not None:
            return order[start:stop]
        return slice(start, stop) if self._plain else np.arange(start, stop)

    def peek(self, rows: int) -> Any:
        # Spread over the arrays: neighbours may be alike.
        where = np.unique(np.linspace(0, self.rows - 1, min(rows, self.rows)).astype(np.int64))
        return self._pack([take(where) for take in self._takes])

    def fingerprint(self) -> dict[str, str]:
        facts = {
            name: array_digest(leaf)
            for name, leaf in zip(leaf_names(self._structure), self._leaves, strict=True)
        }
        order = "in order" if self.shuffle_order is None else str(self.shuffle_order)
        return facts | {"length": f"{self.rows} rows", "order": order}

    def close(self) -> None:
        super().close()
        self._stop()

    def _stop(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _convert(leaf: Any) -> Any:
    """The leaf as Keras would hold it (floats in `floatx`), dense numbers as a NumPy array."""
    if leaf is None:
        return None
    if not array_slicing.can_slice_array(leaf):
        raise DataError(f"expected arrays, got {type(leaf).__name__}: {str(leaf)[:80]}")
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "US":
        leaf = leaf.astype(object)  # the only arrays of strings that Keras knows
    value = array_slicing.convert_to_sliceable(leaf, target_backend="tensorflow")
    if isinstance(value, (tf.Tensor, tf.Variable)) and value.dtype != tf.string:
        value = value.numpy()
    # A view without the subclass: indexing a memmap is slower than indexing an array.
    return np.asarray(value) if isinstance(value, np.ndarray) else value


def _dense(leaf: Any) -> Any:
    return leaf.sparse if isinstance(leaf, array_slicing.TensorflowSparseWrapper) else leaf


def _rows(inputs: Any, leaves: list[Any]) -> int:
    """The number of rows that all arrays have."""
    counts = {}
    for name, leaf in zip(leaf_names(inputs), leaves, strict=True):
        if leaf is None:
            continue
        if len(_dense(leaf).shape) == 0:
            raise DataError(f"{name} is a single number; arrays need a first dimension of rows")
        counts[name] = int(_dense(leaf).shape[0])
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise DataError(f"all arrays must have the same number of rows, but they have {sizes}")
    if not counts or not (rows := next(iter(counts.values()))):
        raise DataError("the arrays have no rows; there is nothing to train on")
    return rows


def _spec(leaf: Any) -> Any:
    if leaf is None:
        return None
    if isinstance(leaf, np.ndarray):
        return tf.TensorSpec((None, *leaf.shape[1:]), leaf.dtype)
    dense = _dense(leaf)
    shape = (None, *dense.shape[1:])
    if isinstance(dense, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, dense.dtype)
    if isinstance(dense, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, dense.dtype, dense.ragged_rank, dense.row_splits.dtype)
    return tf.TensorSpec(shape, dense.dtype)


def _taker(leaf: Any) -> Take:
    """A function from a slice or an array of indices to those rows of `leaf`."""
    if leaf is None:
        return lambda where: None
    if isinstance(leaf, np.ndarray):
        take, get = leaf.take, leaf.__getitem__
        return lambda where: get(where) if type(where) is slice else take(where, 0)
    if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
        return lambda where: array_slicing.slice_tensorflow_sparse_wrapper(leaf, where)
    return lambda where: tf.gather(leaf, where)


def _row_bytes(leaves: list[Any], rows: int) -> float:
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray)) / rows
