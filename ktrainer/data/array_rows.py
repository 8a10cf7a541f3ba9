"""Arrays in memory as rows by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import array_slicing

from ktrainer.data.data_digests import array_digest
from ktrainer.data.dataset_iterator import packer
from ktrainer.data.indexed_feed import Rows
from ktrainer.data.local_batch import leaf_names
from ktrainer.data.shuffling import ShuffleOrder
from ktrainer.errors import DataError

# Gathering fewer bytes than this is faster than passing them between threads.
_PREFETCH_BYTES = 1 << 16

Take = Callable[[Any], Any]


class ArrayRows(Rows):
    """The rows of a structure of arrays with equally many of them.

    Args:
        inputs: the structure; every rank holds all of it.
    """

    def __init__(self, inputs: Any) -> None:
        leaves = [_convert(leaf) for leaf in tf.nest.flatten(inputs)]
        self.count = _count(inputs, leaves)
        self._structure, self._leaves = inputs, leaves
        self._pack = packer(inputs)
        self._takes = [_taker(leaf) for leaf in leaves]
        self._plain = all(leaf is None or isinstance(leaf, np.ndarray) for leaf in leaves)
        self.spec = tf.nest.pack_sequence_as(inputs, [_spec(leaf) for leaf in leaves])

    def take(self, where: slice | np.ndarray, order: ShuffleOrder, epoch: int) -> Any:
        if type(where) is slice and not self._plain:
            where = np.arange(where.start, where.stop)
        return self._pack([take(where) for take in self._takes])

    def is_slow(self, rows: int) -> bool:
        return rows * _row_bytes(self._leaves, self.count) > _PREFETCH_BYTES

    def fingerprint(self) -> dict[str, str]:
        names = leaf_names(self._structure)
        return {n: array_digest(leaf) for n, leaf in zip(names, self._leaves, strict=True)}


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


def _count(inputs: Any, leaves: list[Any]) -> int:
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
        get = leaf.__getitem__
        if not leaf.flags.c_contiguous:  # of which `take` would first copy all rows
            return get
        take = leaf.take
        return lambda where: get(where) if type(where) is slice else take(where, 0)
    if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
        return lambda where: array_slicing.slice_tensorflow_sparse_wrapper(leaf, where)
    return lambda where: tf.gather(leaf, where)


def _row_bytes(leaves: list[Any], rows: int) -> float:
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray)) / rows
