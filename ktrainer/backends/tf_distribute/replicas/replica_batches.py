"""A batch in parts, one for each replica of this process, and how they get there.

The parts are cut on the CPU before the replicas run: whole batches stay off the devices, and what
a replica gets is one tensor, of whose shape a TPU's compiler must be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.data.local_batch import graph_bounds, graph_slice


def on_host(batch: Any) -> Any:
    """`batch` with its arrays as tensors in host memory: where no device is named, TensorFlow makes
    them on the first GPU, from which parts would have to be copied back."""
    with tf.device("CPU:0"):
        return tf.nest.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
        )


def parts_of(batch: Any, counts: tf.Tensor, count: int) -> list[tuple[Any, tf.Tensor]]:
    """For each replica its rows of `batch`, padding where there are none, and its weight.

    Args:
        batch: this process's rows; padding when it has none.
        counts: float64 vector: true rows of `batch`, and those of the whole update.
        count: replicas of this process.

    Returns:
        The rows and a float64 scalar, the replica's part of the update's rows.
    """
    with tf.device("CPU:0"):
        rows = tf.cast(counts[0], tf.int64)
        return [
            (
                batch if count == 1 else graph_slice(batch, rows, number, count),
                tf.cast(graph_bounds(rows, number, count)[1], tf.float64)
                / tf.maximum(counts[1], 1.0),
            )
            for number in range(count)
        ]


def spread(
    strategy: tf.distribute.Strategy, parts: Sequence[Any], first: int
) -> tuple[tuple[Any, ...], Callable[[Sequence[Any]], Any]]:
    """Arguments of `strategy.run` that give each replica its number and its part.

    Args:
        strategy: whose replicas they are for.
        parts: nested tensors for each replica of this process, all of one structure.
        first: number of the first of them among those of all processes.

    Returns:
        The arguments: the number, from 0 in each process, and the leaves of the part; and a
        function that makes of the leaves, as a replica gets them, its part.
    """
    rows = [[number, *tf.nest.flatten(part)] for number, part in enumerate(parts)]

    def unpack(leaves: Sequence[Any]) -> Any:
        return tf.nest.pack_sequence_as(parts[0], leaves)

    if len(rows) == 1:
        return tuple(rows[0]), unpack

    def of_replica(context: Any) -> list[Any]:
        return rows[context.replica_id_in_sync_group - first]

    return tuple(strategy.experimental_distribute_values_from_function(of_replica)), unpack
