"""Denominators of Keras' losses, counted over all parts of an update.

Replacement for a function of Keras; see `steps.keras_patches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import ops
from keras.src.losses import loss as loss_module
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from ktrainer.steps.step_context import StepContext

# Operations with as many results as their inputs' values ask for, as tf.boolean_mask has.
_SELECTIONS = ("Where", "Unique", "DynamicPartition", "ListDiff", "NonMaxSuppression")
# Those with as many as they are told, whatever their inputs have: lookups of bags, experts.
_RESTORED = (
    *("Segment", "SparseSegment", "UnsortedSegment", "ScatterNd", "TensorScatter"),
    *("DynamicStitch", "ParallelDynamicStitch", "SparseToDense", "SparseFillEmptyRows"),
)


def reduce_weighted_values(context: StepContext, original: Callable[..., Any]) -> Any:
    """Divide a loss by its denominator over all parts of the update."""

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        values = ops.convert_to_tensor(values, dtype=dtype)
        if context.in_global_loss or reduction in (None, "none") or values.shape.rank == 0:
            return original(values, sample_weight, mask, reduction, dtype)
        if sample_weight is not None:
            sample_weight = ops.convert_to_tensor(sample_weight, dtype=dtype)
        values, sample_weight, mask = _weighted_values(values, sample_weight, mask)
        elements = tf.cast(tf.size(values), values.dtype)  # of the product, as Keras counts
        total = ops.sum(values)
        part: Any = 1
        if context.gathered:
            part = tf.cast(context.part(values), values.dtype)
        if reduction == "sum":
            return context.as_mean(total * part)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            denominator = ops.sum(sample_weight)
        elif mask is not None and reduction != "mean_with_sample_weight":
            denominator = ops.sum(mask) * elements / tf.cast(tf.size(mask), values.dtype)
        elif context.uniform and not _has_other_rows(context, values):
            return ops.divide_no_nan(total, elements)
        else:
            denominator = elements
        counted = context.denominator(denominator * part)
        return context.as_mean(ops.divide_no_nan(total * part, counted))

    return reduced


def _weighted_values(values: Any, weights: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Values times their weights and mask, these as one, and the mask in the values' type."""
    if mask is not None:
        mask = ops.cast(ops.convert_to_tensor(mask), values.dtype)
        # With "sum" Keras multiplies by the mask and leaves out its own normalisation.
        weights = loss_module.apply_mask(weights, mask, values.dtype, "sum")
    if weights is not None:
        values, weights = loss_module.squeeze_or_expand_to_same_rank(
            values, ops.cast(weights, values.dtype)
        )
        values = values * weights
    return values, weights, mask


def _has_other_rows(context: StepContext, values: Any) -> bool:
    """Whether the data choose how many values a loss has, where all ranks count them alike."""
    if not tf.is_symbolic_tensor(values):
        context.uneven |= isinstance(context.rows, int) and values.shape[0] != context.rows
        return False  # one rank may compute losses that others do not
    if isinstance(values.graph, ControlFlowFuncGraph):
        return False  # likewise, in a branch or loop
    if context.denominators is not None and not context.capture:
        return False  # a pipeline counts apart from the stage that computes the values
    waiting, seen = [values.op], {values.op.name}
    while waiting:
        op = waiting.pop()
        if op.type.startswith(_SELECTIONS):
            return True
        if op.type.startswith(_RESTORED):
            continue
        new = [x.op for x in op.inputs if x.op.name not in seen]
        seen.update(each.name for each in new)
        waiting += new
    return False
