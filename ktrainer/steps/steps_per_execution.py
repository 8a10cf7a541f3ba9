"""Several updates in one compiled call: less Python between small steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.steps.program_interface import LocalBatchLike


def stack_local_batches(
    local_batches: Sequence[LocalBatchLike],
    weigh: Callable[[LocalBatchLike], np.ndarray | np.float64],
) -> tuple[Any, np.ndarray] | None:
    """Batches stacked on a new first axis, and their weights; None if they do not stack.

    Local batches stack when all have the same shapes and none is padding.

    Args:
        local_batches: one for each step.
        weigh: what a step is given beside its batch.
    """
    if any(each.examples == 0 for each in local_batches):
        return None
    flat = [keras.tree.flatten(each.batch) for each in local_batches]
    shapes = {tuple(tuple(leaf.shape) for leaf in leaves) for leaves in flat}
    if len(shapes) != 1:
        return None
    stacked = [tf.stack(column) for column in zip(*flat, strict=True)]
    batch = keras.tree.pack_sequence_as(local_batches[0].batch, stacked)
    return batch, np.array([weigh(each) for each in local_batches])


def compile_many(step: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled loop of `step(batch, weight)` over stacked batches; the last step's logs."""

    def many(batches: Any, weights: tf.Tensor) -> Any:
        def one(i: Any) -> Any:
            return step(keras.tree.map_structure(lambda t: t[i], batches), weights[i])

        logs = one(0)
        _, logs = tf.while_loop(
            lambda i, logs: i < tf.shape(weights)[0],
            lambda i, logs: (i + 1, one(i)),
            (tf.constant(1), logs),
            parallel_iterations=1,  # updates follow one another
        )
        return logs

    return tf.function(many, reduce_retracing=True, autograph=False)
