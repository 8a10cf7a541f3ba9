"""Sums over the replicas of a strategy: the gradient plane of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ktrainer.world.plane import Gradient, GradientPlane, InOrder, weighted


class ReplicaPlane(GradientPlane):
    """Sums from inside of a replica's step, over all replicas of all processes.

    Args:
        strategy: a synchronous strategy.
        options: `tf.distribute.experimental.CommunicationOptions`; None for TensorFlow's own.
    """

    name = "tf.distribute"
    seconds = None  # collectives run inside of TensorFlow, which does not say for how long

    def __init__(self, strategy: tf.distribute.Strategy, options: Any = None) -> None:
        self.size = strategy.num_replicas_in_sync
        self._options = options

    def reduce(
        self, gradients: Sequence[Gradient], weight: tf.Tensor, order: InOrder
    ) -> list[Gradient]:
        ours = [_weighted(gradient, weight) for gradient in gradients]
        return self._all_reduce(ours, order) if ours else []

    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        return self._all_reduce([vector], order)[0]

    def _all_reduce(self, tensors: list[Gradient], order: InOrder) -> list[Gradient]:
        """Their sums. TensorFlow packs all tensors of a call, which must then be of one type."""
        summed: list[Gradient] = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sums = self._all_reduce_of_one_type([tensors[i] for i in places], order)
            for i, total in zip(places, sums, strict=True):
                summed[i] = total
        return summed

    def _all_reduce_of_one_type(self, tensors: list[Gradient], order: InOrder) -> list[Gradient]:
        context = tf.distribute.get_replica_context()
        return order(
            lambda: list(
                context.all_reduce(tf.distribute.ReduceOp.SUM, tensors, options=self._options)
            )
        )


def _weighted(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = weighted(gradient.values, weight)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return weighted(gradient, weight)
