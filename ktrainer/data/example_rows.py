"""Examples of a random-access data set as rows by index."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.data.batch_source import describe
from ktrainer.data.batch_specs import fits, spec_of
from ktrainer.data.data_arguments import class_weights, from_torch, lists_to_tuples
from ktrainer.data.data_digests import batch_digest
from ktrainer.data.examples import Examples
from ktrainer.data.indexed_feed import Rows
from ktrainer.data.local_batch import leaf_names
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.data.stage_times import StageTimes
from ktrainer.errors import DataError

_UNLIKE = (
    "All examples must have the structure, shapes and dtypes of the first: pad or cast them in "
    "the data set, or in the transform of ktrainer.data.Examples"
)


class ExampleRows(Rows):
    """The examples of a random-access data set, stacked into batches.

    Floats become `keras.config.floatx()`, as those of arrays.

    Args:
        data: an `Examples`, or a data set for which `is_random_access` is true.
        class_weight: class -> weight, turned into sample weights.

    Raises:
        DataError: there are no examples, or one is unlike the first, or cannot be trained on.
    """

    def __init__(self, data: Any, class_weight: Mapping[int, float] | None = None) -> None:
        self._examples = data if isinstance(data, Examples) else Examples(data)
        self._source = _in_numpy(self._examples.source)
        self._class_weight = class_weight
        self._pool: ThreadPoolExecutor | None = None
        self._times, named = StageTimes(), self._examples.transform
        kind = type(self._examples.source).__name__
        self._name = f"{kind}[index]" + (f" and {_name(named)}" if named is not None else "")
        self.draws, self.count = self._examples.random, len(self._source)
        if not self.count:
            raise DataError("the data set has no examples; there is nothing to train on")
        self.spec = None
        self.spec = spec_of(self.take(slice(0, 1), ShuffleOrder(), 0))

    def take(self, where: slice | np.ndarray, order: ShuffleOrder, epoch: int) -> Any:
        rows = range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
        with self._times.timed(self._name):
            examples = self._read(rows, order, epoch)
        self._times.batches += 1
        with self._times.timed("stacking examples"):
            return self._stacked(examples, rows)

    def _read(self, rows: Any, order: ShuffleOrder, epoch: int) -> list[Any]:
        items = self._items(rows, order, epoch)
        return [
            self._example(row, item, order, epoch) for row, item in zip(rows, items, strict=True)
        ]

    def _stacked(self, examples: list[Any], rows: Any) -> Any:
        try:
            batch = tf.nest.map_structure(lambda *leaves: _stack(leaves), *examples)
        except (TypeError, ValueError) as error:
            raise DataError(f"examples {list(rows)[:8]} are unlike: {error}. {_UNLIKE}") from error
        if self._class_weight is not None:
            batch = _with_weights(batch, self._class_weight)
        return batch if self.spec is None else self._like_first(batch, rows)

    def slow_stage(self) -> str | None:
        return self._times.slowest()

    def is_slow(self, rows: int) -> bool:
        return True

    fingerprint_reads = True

    def fingerprint(self) -> dict[str, str]:
        where = np.unique(np.linspace(0, self.count - 1, 3).astype(np.int64))
        batch = self.take(where, ShuffleOrder(), 0)
        leaves = zip(leaf_names(batch), tf.nest.flatten(batch), strict=True)
        return {f"examples/{name}": f"{batch_digest(leaf):016x}" for name, leaf in leaves}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _items(self, rows: Any, order: ShuffleOrder, epoch: int) -> Any:
        """The items of some rows; with workers, transformed."""
        workers = self._examples.workers
        if workers:
            self._pool = self._pool or ThreadPoolExecutor(workers, "ktrainer-feed-examples")
            return self._pool.map(
                lambda row: self._transformed(row, self._source[row], order, epoch), rows
            )
        several = getattr(self._source, "__getitems__", None)
        return map(self._source.__getitem__, rows) if several is None else several(list(rows))

    def _transformed(self, row: int, item: Any, order: ShuffleOrder, epoch: int) -> Any:
        transform = self._examples.transform
        if transform is None:
            return item
        return transform(item, order.generator(epoch, row)) if self.draws else transform(item)

    def _example(self, row: int, item: Any, order: ShuffleOrder, epoch: int) -> Any:
        """A checked example, of tuples, dicts and what is stacked."""
        if not self._examples.workers:
            item = self._transformed(row, item, order, epoch)
        example = lists_to_tuples(item)
        if example is None:
            raise DataError(
                f"example {row} of the data set is None, as where Grain filters. An order by index "
                "needs a known number of examples: filter beforehand, or give an iterator"
            )
        if isinstance(example, tuple) and not 1 <= len(example) <= 3:
            raise DataError(
                f"example {row} is a tuple of {len(example)}; it must be x, (x,), (x, y) or "
                "(x, y, sample_weight): give several inputs as a dict or an inner tuple"
            )
        return example

    def _like_first(self, batch: Any, rows: Any) -> Any:
        """The batch, its dtypes those of `spec`."""
        try:
            cast = tf.nest.map_structure(_cast, self.spec, batch)
            if fits(cast, self.spec):
                return cast
        except (TypeError, ValueError):
            pass
        raise DataError(
            f"examples {list(rows)[:8]} are {describe(spec_of(batch))}, but the first is "
            f"{describe(self.spec)}. {_UNLIKE}"
        )


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _in_numpy(source: Any) -> Any:
    """A data set of Hugging Face with its columns as arrays, if it has no format; others as is."""
    whole = type(source).__module__.partition(".")[0] == "datasets" and hasattr(source, "format")
    return source.with_format("numpy") if whole and source.format["type"] is None else source


def _stack(leaves: tuple[Any, ...]) -> Any:
    if all(leaf is None for leaf in leaves):
        return None
    if any(isinstance(leaf, (bytes, str)) for leaf in leaves):
        return tf.convert_to_tensor(leaves, tf.string)  # NumPy would cut off zero bytes at the end
    if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
        raise ValueError("ragged and sparse tensors cannot be stacked")
    batch = np.stack([np.asarray(from_torch(leaf)) for leaf in leaves])
    if batch.dtype.kind in "OUS":
        return tf.convert_to_tensor(batch, tf.string)
    return batch.astype(keras.config.floatx(), copy=False) if batch.dtype.kind == "f" else batch


def _cast(spec: Any, leaf: Any) -> Any:
    if spec is None or leaf is None:
        return leaf
    if spec.dtype == tf.as_dtype(leaf.dtype):
        return leaf
    return leaf.astype(spec.dtype.as_numpy_dtype, casting="safe")


def _with_weights(batch: Any, class_weight: Mapping[int, float]) -> Any:
    if isinstance(batch, tuple) and len(batch) == 3:
        raise DataError("class_weight and sample weights exclude each other; give one of them")
    if not isinstance(batch, tuple) or len(batch) < 2:
        return batch
    return (*batch, class_weights(batch[1], class_weight))
