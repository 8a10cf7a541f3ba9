"""The sum of all gradients of an update over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from ktrainer.distributed.collectives import Gradient, GradientCollectives, InOrder
from ktrainer.steps.embedding_gradients import CommonSlices


def reduce_gradients(
    collectives: GradientCollectives,
    gradients: Sequence[Gradient],
    numbers: Sequence[tf.Tensor],
    weight: tf.Tensor,
    order: InOrder,
) -> tuple[list[Gradient], list[tf.Tensor]]:
    """The weighted sums of gradients, and of numbers, over ranks, by `collectives.reduce`.

    `CommonSlices` are summed slice by slice and other slices concatenated, unless all are sent as
    dense tensors.

    Args:
        gradients: all of them present; the same ones are `CommonSlices` on every rank.
        numbers: scalars; they go in the same message, in the type of the gradients, unless those
            are compressed.
    """
    wire = tf.float64 if any(g.dtype == tf.float64 for g in gradients) else tf.float32
    more = [tf.reshape(tf.cast(number, wire), [1]) for number in numbers]
    sent = list(gradients)
    if not collectives.sparse_as_dense:
        sent = [g.values if isinstance(g, CommonSlices) else g for g in gradients]
    apart = collectives.compression != "none"  # which numbers must not have
    reduced = collectives.reduce(sent if apart else [*sent, *more], weight, order)
    if apart and more:
        reduced += collectives.reduce(more, weight, order, compressed=False)
    for i, gradient in enumerate(gradients):
        if sent[i] is not gradient:
            reduced[i] = tf.IndexedSlices(reduced[i], gradient.indices, gradient.dense_shape)
    return reduced[: len(sent)], [total[0] for total in reduced[len(sent) :]]
