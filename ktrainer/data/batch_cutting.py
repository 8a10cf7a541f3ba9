"""One replica's piece of a batch: its rows, and digests of the whole batch.

NumPy takes rows of arrays without copying them. Of strings, ragged and sparse tensors that takes
milliseconds in Python, so the threads of a tf.data pipeline do it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ktrainer.data.batch_source import Piece
from ktrainer.data.data_digests import batch_digest, tensor_digest
from ktrainer.data.local_batch import (
    count_rows,
    graph_slice,
    leaf_names,
    not_examples,
    require_examples,
    rows_in_graph,
    take_slice,
)


def piece_of(batch: Any, replica: int, replicas: int) -> Piece:
    """A replica's piece of a batch of concrete tensors or arrays.

    Raises:
        DataError: its parts have different first axes.
    """
    rows = count_rows(batch)
    if replicas > 1:
        require_examples(batch, replica, replicas)
    if not rows:
        return Piece(batch, 0)
    digests = tuple(batch_digest(leaf) for leaf in tf.nest.flatten(batch))
    return Piece(take_slice(batch, rows, replica, replicas), rows, digests)


def has_numbers_alone(spec: Any) -> bool:
    """Return whether all parts of a batch can be NumPy arrays of the same memory."""
    leaves = tf.nest.flatten(spec)
    return all(isinstance(leaf, tf.TensorSpec) and _is_number(leaf.dtype) for leaf in leaves)


def _is_number(dtype: tf.DType) -> bool:
    return dtype.is_numpy_compatible and not dtype.is_quantized and dtype != tf.string


def cut_in_graph(batch: Any, replica: int | tf.Tensor, replicas: int) -> tuple[Any, tf.Tensor]:
    """A replica's rows, and `[rows, digest]` of each part of the whole batch: TensorFlow ops."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    counts_and_digests = [tf.stack([rows_in_graph(leaf), tensor_digest(leaf)]) for leaf in leaves]

    def rows_of(leaf: Any) -> Any:
        return graph_slice(leaf, rows_in_graph(leaf), replica, replicas)

    cut = tf.nest.map_structure(lambda leaf: leaf if leaf is None else rows_of(leaf), batch)
    return cut, tf.stack(counts_and_digests)


def piece_from_graph(result: tuple[Any, tf.Tensor], replica: int, replicas: int) -> Piece:
    """Make a piece of what `cut_in_graph` returned.

    Raises:
        DataError: the parts of the whole batch have different first axes.
    """
    batch, known = result[0], iter(result[1].numpy().tolist())
    leaves = tf.nest.flatten(batch)
    rows, digests = zip(*[(None, 0) if x is None else next(known) for x in leaves], strict=True)
    named = zip(leaf_names(batch), rows, strict=True)
    counts = {name: count for name, count in named if count is not None}
    if replicas > 1 and len(set(counts.values())) > 1:
        raise not_examples(counts, replica, replicas)
    return Piece(batch, next(iter(counts.values())), digests)
