"""One replica's piece of a batch: its rows, and digests of the whole batch.

Arrays of numbers are cut by NumPy, which copies nothing. Strings, ragged and sparse tensors, of
which that would take milliseconds, are cut by TensorFlow in the threads of a tf.data pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.data.batch_source import Piece
from ktrainer.data.data_digests import batch_digest, tensor_digest
from ktrainer.data.local_batch import (
    count_rows,
    graph_slice,
    leaf_names,
    not_examples,
    rows_in_graph,
    take_slice,
)


def piece_of(batch: Any, replica: int, replicas: int) -> Piece:
    """A replica's piece of a batch of concrete tensors or arrays.

    Raises:
        DataError: its parts have different first axes.
    """
    rows = count_rows(batch)
    if not rows:
        return Piece(batch, 0)
    batch = tf.nest.map_structure(_as_array, batch)
    digests = tuple(batch_digest(leaf) for leaf in tf.nest.flatten(batch))
    return Piece(take_slice(batch, rows, replica, replicas), rows, digests)


def is_of_arrays(spec: Any) -> bool:
    """Return whether `piece_of` is fast for batches of a spec."""
    leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
    return all(isinstance(leaf, tf.TensorSpec) and _is_of_numbers(leaf.dtype) for leaf in leaves)


def cut_in_graph(batch: Any, replica: int | tf.Tensor, replicas: int) -> tuple[Any, tf.Tensor]:
    """A replica's rows, and of each array of the batch `[rows, digest]`, as TensorFlow ops."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    facts = [tf.stack([rows_in_graph(leaf), tensor_digest(leaf)]) for leaf in leaves]

    def rows_of(leaf: Any) -> Any:
        return graph_slice(leaf, rows_in_graph(leaf), replica, replicas)

    cut = tf.nest.map_structure(lambda leaf: leaf if leaf is None else rows_of(leaf), batch)
    return cut, tf.stack(facts)


def piece_of_cut(cut: tuple[Any, tf.Tensor], replica: int, replicas: int) -> Piece:
    """The piece of what `cut_in_graph` has returned.

    Raises:
        DataError: its parts have different first axes.
    """
    batch, facts = cut[0], iter(cut[1].numpy().tolist())
    leaves = tf.nest.flatten(batch)
    rows, digests = zip(*[(None, 0) if x is None else next(facts) for x in leaves], strict=True)
    named = zip(leaf_names(batch), rows, strict=True)
    counts = {name: count for name, count in named if count is not None}
    if replicas > 1 and len(set(counts.values())) > 1:
        raise not_examples(counts, replica, replicas)
    return Piece(batch, next(iter(counts.values())), digests)


def _as_array(leaf: Any) -> Any:
    """An array in the memory of a tensor of numbers; all else as it is."""
    is_tensor = isinstance(leaf, tf.Tensor) and _is_of_numbers(leaf.dtype)
    return np.asarray(leaf) if is_tensor and "CPU" in leaf.device else leaf


def _is_of_numbers(dtype: tf.DType) -> bool:
    return dtype.is_numpy_compatible and not dtype.is_quantized and dtype != tf.string
