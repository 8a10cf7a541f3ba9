"""Sums over the replicas of a strategy: the collectives of `tf.distribute`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ktrainer.distributed.collectives import (
    Gradient,
    GradientCollectives,
    InOrder,
    densified,
    weighted,
)


class ReplicaCollectives(GradientCollectives):
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
        # A TPU sums tensors of one shape on all replicas, which slices need not have.
        self._dense = isinstance(strategy, tf.distribute.TPUStrategy)

    def reduce(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        order: InOrder,
        *,
        compressed: bool = True,
    ) -> list[Gradient]:
        if self._dense:
            gradients = [densified(gradient) for gradient in gradients]
        ours = [weighted(gradient, weight) for gradient in gradients]
        return self._all_reduce(ours, order) if ours else []

    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        return self._all_reduce([vector], order)[0]

    def _all_reduce(self, tensors: list[Gradient], order: InOrder) -> list[Gradient]:
        """Sums, one collective for each dtype: between processes TensorFlow packs them together."""
        context, reduced = tf.distribute.get_replica_context(), list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            sum_them = partial(
                context.all_reduce,
                tf.distribute.ReduceOp.SUM,
                [tensors[i] for i in places],
                options=self._options,
            )
            sums = order(sum_them)
            for i, total in zip(places, sums, strict=True):
                reduced[i] = total
        return reduced
