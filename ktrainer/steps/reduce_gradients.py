"""The sum of all gradients of an update over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ktrainer.distributed.collectives import Gradient, GradientCollectives, InOrder
from ktrainer.steps.embedding_gradients import CommonSlices


def reduce_gradients(
    collectives: GradientCollectives,
    gradients: Sequence[Gradient],
    weight: tf.Tensor,
    order: InOrder,
) -> list[Gradient]:
    """The weighted sums of gradients over ranks, by `collectives.reduce`.

    `CommonSlices` are summed slice by slice and other slices concatenated, unless all are sent as
    dense tensors.

    Args:
        gradients: all of them present; the same ones are `CommonSlices` on every rank.
    """
    if collectives.sparse_as_dense:
        return collectives.reduce(gradients, weight, order)
    sent = [g.values if isinstance(g, CommonSlices) else g for g in gradients]
    return [
        tf.IndexedSlices(total, g.indices, g.dense_shape) if isinstance(g, CommonSlices) else total
        for g, total in zip(gradients, collectives.reduce(sent, weight, order), strict=True)
    ]
