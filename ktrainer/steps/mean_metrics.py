"""Means that a step counts: the weight of a rank's scalars and vectors in them.

A replacement for a method of Keras; see `steps.keras_patches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops

from ktrainer.steps.step_context import StepContext


def update_mean(context: StepContext, original: Callable[..., Any]) -> Any:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        # Keras counts each part of a loss once a batch, but with its rows where their number is
        # static, as it is in a pipeline, and in a step that runs eagerly.
        if isinstance(sample_weight, int) and not context.sums:
            eagerly = tf.executing_eagerly()
            rows = tf.cast(sample_weight, self.dtype)
            sample_weight = (
                rows * tf.cast(context.weight, self.dtype) if context.in_global_loss else rows
            )
            sample_weight = sample_weight if eagerly else None
        if context.sums and isinstance(sample_weight, (int, float, type(None))):
            values, sample_weight = _part_of_sum(context, self.dtype, values, sample_weight)
        if sample_weight is None or tf.convert_to_tensor(sample_weight).shape.rank:
            values, sample_weight = _share_of(context, self.dtype, values, sample_weight)
        return original(self, values, sample_weight)

    return update_state


def _share_of(context: StepContext, dtype: Any, values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """A mean's values, and what this share weighs them with: ranks count gathered rows once."""
    tensor = ops.convert_to_tensor(values)
    over_examples = context.is_over_examples(tensor)
    # Where the number of rows is static, in eager steps and pipelines, other lengths tell nothing.
    known = not tf.executing_eagerly() and context.rows_of_draws is None
    of_all_rows = tensor.shape.rank == 0 or (known and not over_examples)  # as a mean loss
    if of_all_rows and sample_weight is None:
        return tensor, tf.fill(tensor.shape[:1], tf.cast(context.weight, dtype))
    if not context.gathered or not over_examples:
        return values, sample_weight
    part = tf.cast(context.part(tensor), dtype)
    if sample_weight is None:
        return tf.identity(tensor), tf.fill(tf.shape(tensor)[:1], part)
    return values, tf.cast(sample_weight, dtype) * part


def _part_of_sum(context: StepContext, dtype: Any, values: Any, weight: Any) -> tuple[Any, Any]:
    """A scalar and its weight so that the parts of all ranks count as their sum, once."""
    tensor = ops.convert_to_tensor(values, dtype)
    if context.collectives is None or tensor.shape.rank != 0:
        return values, weight
    size = context.collectives.size
    return tensor * size, ops.convert_to_tensor((1 if weight is None else weight) / size, dtype)
