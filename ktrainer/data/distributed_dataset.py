"""A rank's rows of the batches of a `tf.data.Dataset`, for loops of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from ktrainer.data.batch_source import describe
from ktrainer.data.data_agreement import (
    ENDED,
    FAILED,
    HAS_BATCH,
    exchange,
    raise_failed,
    raise_other_rows,
    raise_uneven,
)
from ktrainer.data.data_digests import tensor_digest
from ktrainer.data.local_batch import graph_bounds, leaf_names, rows_in_graph
from ktrainer.data.rank_consistency import check_consistency
from ktrainer.distributed.world import World
from ktrainer.errors import DataError


def require_dataset(data: Any) -> None:
    """Refuse what is no `tf.data.Dataset` of batches.

    Raises:
        DataError: as said.
    """
    if not isinstance(data, tf.data.Dataset):
        raise DataError(
            f"trainer.distribute takes a tf.data.Dataset of global batches, not a "
            f"{type(data).__name__}. Make one with tf.data.Dataset.from_tensor_slices(arrays)"
            ".batch(n), or from_generator"
        )
    if not any(_is_cut(spec) for spec in tf.nest.flatten(data.element_spec)):
        raise DataError(
            f"the tf.data pipeline yields single rows ({data.element_spec}), not batches; end it "
            "with `.batch(batch_size)`"
        )


def compare_datasets(dataset: tf.data.Dataset, world: World) -> None:
    """Compare the structure and the number of batches of all ranks.

    Raises:
        DivergenceError: on every rank, naming what differs.
    """
    count = int(dataset.cardinality())
    length = {-1: "endless", -2: "unknown"}.get(count, f"{count} batches")
    facts = {"structure": describe(dataset.element_spec), "length": length}
    check_consistency(world, data_facts=facts)


class DistributedDataset(tf.data.Dataset):
    """This rank's contiguous rows of each global batch, which all ranks read alike.

    A loop in Python compares the first batch of each pass with those of the other ranks, and every
    batch where the number of batches is unknown. A loop in a `tf.function` compares nothing.

    Args:
        dataset: of global batches, the same on all ranks.
        world: all ranks.
        prefetch: local batches kept ready; 0 leaves that to TensorFlow.
    """

    def __init__(self, dataset: tf.data.Dataset, world: World, prefetch: int) -> None:
        require_dataset(dataset)
        compare_datasets(dataset, world)
        self._global, self._world, self._prefetch = dataset, world, prefetch
        self._local = self._prefetched(dataset.map(self._rows))
        super().__init__(tf.data.experimental.to_variant(self._local))

    @property
    def global_batches(self) -> tf.data.Dataset:
        """The dataset of all ranks."""
        return self._global

    @property
    def element_spec(self) -> Any:
        return self._local.element_spec

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._local]

    def __iter__(self) -> Iterator[Any]:
        if not tf.executing_eagerly():
            return super().__iter__()
        first: list[np.ndarray] = []
        return ComparedIterator(self._recorded(first), first, self._world)

    def _prefetched(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.prefetch(self._prefetch) if self._prefetch else dataset

    @tf.autograph.experimental.do_not_convert
    def _rows(self, *parts: Any) -> Any:
        """This rank's rows of a batch; none if it has fewer than there are ranks."""
        batch = parts if isinstance(self._global.element_spec, tuple) else parts[0]
        leaves = [leaf for leaf in tf.nest.flatten(batch) if _is_cut(leaf)]
        rows = [rows_in_graph(leaf) for leaf in leaves]
        message = "the parts of a batch have different numbers of rows, so it cannot be distributed"
        checks = [tf.debugging.assert_equal(each, rows[0], message) for each in rows[1:]]
        with tf.control_dependencies([check for check in checks if check is not None]):
            replica = tf.constant(self._world.replica, tf.int64)
            start, count = graph_bounds(rows[0], replica, self._world.replicas)
        return tf.nest.map_structure(lambda leaf: _slice(leaf, start, count), batch)

    def _recorded(self, first: list[np.ndarray]) -> tf.data.Dataset:
        """The same rows; of batches to compare, `first` gets `[rows, digest of each leaf]`."""
        always = self._global.cardinality() == tf.data.UNKNOWN_CARDINALITY

        def record(facts: np.ndarray) -> np.bool_:
            first.append(facts)
            return np.bool_(True)

        @tf.autograph.experimental.do_not_convert
        def rows(number: tf.Tensor, batch: Any) -> Any:
            def recorded() -> tf.Tensor:
                return tf.numpy_function(record, [_facts(batch)], tf.bool, stateful=True)

            needed = tf.constant(True) if always else number == 0
            done = tf.ensure_shape(tf.cond(needed, recorded, lambda: tf.constant(True)), [])
            with tf.control_dependencies([done]):
                parts = batch if isinstance(self._global.element_spec, tuple) else (batch,)
                return self._rows(*parts)

        return self._prefetched(self._global.enumerate().map(rows))


class ComparedIterator(OwnedIterator):
    """An iterator that compares its first batch with those of other ranks, or each one.

    Args:
        dataset: of local batches.
        recorded: filled with the facts of those global batches that are compared.
        world: all ranks.
    """

    def __init__(self, dataset: tf.data.Dataset, recorded: list[np.ndarray], world: World) -> None:
        super().__init__(dataset)
        self._recorded, self._world = recorded, world
        self._names = leaf_names(dataset.element_spec)
        self._always = dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
        self._taken = 0

    def __next__(self) -> Any:
        if self._taken and not self._always:
            return super().__next__()
        try:
            batch = super().__next__()
        except StopIteration:
            self._compare(ENDED)
            raise
        except Exception:
            self._exchange(FAILED)  # the others wait for this rank's answer
            raise
        self._compare(HAS_BATCH)
        self._taken += 1
        return batch

    def _compare(self, state: int) -> None:
        table = self._exchange(state)
        raise_failed(table[:, 0])
        if len(set(table[:, 0].tolist())) > 1:
            raise_uneven(self._world, table[:, 0], self._taken)
        raise_other_rows(
            self._world, table[:, 1:], self._names, f"batch {self._taken} of this pass"
        )

    def _exchange(self, state: int) -> np.ndarray:
        facts = self._recorded.pop(0).tolist() if state == HAS_BATCH else []
        row = [state, *facts, *[0] * (1 + len(self._names) - len(facts))]
        return exchange(self._world, row, "agree on the next batch")


def _facts(batch: Any) -> tf.Tensor:
    """The number of rows of a batch, then a digest of each leaf."""
    leaves = tf.nest.flatten(batch)
    rows = next(rows_in_graph(leaf) for leaf in leaves if _is_cut(leaf))
    return tf.stack([rows, *(tensor_digest(leaf) for leaf in leaves)])


def _is_cut(leaf: Any) -> bool:
    """Whether a tensor, or its spec, has rows: a scalar is the same on all ranks."""
    return leaf is not None and leaf.shape.rank != 0


def _slice(leaf: Any, start: tf.Tensor, count: tf.Tensor) -> Any:
    if not _is_cut(leaf):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        others = leaf.dense_shape[1:]
        begin = tf.concat([[start], tf.zeros_like(others)], 0)
        return tf.sparse.slice(leaf, begin, tf.concat([[count], others], 0))
    return leaf[start : start + count]
