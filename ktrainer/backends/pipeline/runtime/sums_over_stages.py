"""Sums over stages inside of a step: of gradients that several of them have a part of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.transport import Transport


class SumsOverStages:
    """Sums tensors over the stages of a replica. All of them make the same calls.

    The first stage adds up, in the order of stages, and sends the sum to the others: so all have
    the same bits.

    Args:
        transport: to the other stages.
        channel: of arrays between the first stage and another one.
        message: runs a host function in the order of messages; see `StageRunner.message`.
    """

    def __init__(
        self, transport: Transport, channel: int, message: Callable[..., list[Any]]
    ) -> None:
        self._transport, self._channel, self._message = transport, channel, message
        self._world = transport.world

    def of(self, gradients: Sequence[Any], likes: Sequence[Any], what: str) -> list[Any]:
        """Sums of gradients; slices are joined if no stage has anything else.

        Args:
            gradients: a tensor, slices, or None where this stage has no part.
            likes: for each of them something with its shape and dtype.

        Returns:
            None where no stage has a part.
        """
        if self._world.size == 1 or not likes:
            return list(gradients)
        kinds = [0 if g is None else 2 if isinstance(g, tf.IndexedSlices) else 1 for g in gradients]
        every = list(zip(*self._world.allgather(kinds, f"parts of {what}"), strict=True))
        return [
            self._one(gradient, like, set(of_stages) - {0}, what)
            for gradient, like, of_stages in zip(gradients, likes, every, strict=True)
        ]

    def _one(self, gradient: Any, like: Any, kinds: set[int], what: str) -> Any:
        if not kinds:
            return None
        dtype, shape = tf.as_dtype(like.dtype), tf.TensorShape(like.shape)
        if kinds == {2}:
            width = shape[1:]
            if gradient is None:
                values = tf.zeros([0, *width], dtype)
                gradient = tf.IndexedSlices(values, tf.zeros([0], tf.int64))
            pair = [gradient.values, tf.cast(gradient.indices, tf.int64)]
            specs = [tf.TensorSpec([None, *width], dtype), tf.TensorSpec([None], tf.int64)]
            joined = self._combined(pair, specs, np.concatenate, what)
            return tf.IndexedSlices(*joined, _shape_of(like))
        mine = tf.zeros(_shape_of(like), dtype) if gradient is None else gradient
        mine = tf.convert_to_tensor(mine)
        return self._combined([mine], [tf.TensorSpec(shape, dtype)], sum, what)[0]

    def _combined(
        self,
        tensors: Sequence[Any],
        specs: Sequence[tf.TensorSpec],
        combine: Callable[[Any], Any],
        what: str,
    ) -> list[Any]:
        others = range(1, self._world.size)

        def send(array: np.ndarray, partition: int) -> None:
            self._transport.send_shaped(array, partition, self._channel, what)

        def receive(like: np.ndarray, partition: int) -> np.ndarray:
            return self._transport.receive_shaped(
                like.ndim, like.dtype, partition, self._channel, what
            )

        def exchange(*arrays: np.ndarray) -> list[np.ndarray]:
            results = []
            for array in arrays:
                if self._world.rank:
                    send(array, 0)
                    results.append(receive(array, 0))
                    continue
                total = np.asarray(combine([array, *(receive(array, p) for p in others)]))
                for partition in others:
                    send(total, partition)
                results.append(total)
            return results

        return self._message(exchange, tensors, specs)


def _shape_of(like: Any) -> tf.Tensor:
    shape = tf.TensorShape(like.shape)
    known = shape.is_fully_defined()
    return tf.constant(shape.as_list(), tf.int64) if known else tf.shape(like, tf.int64)
