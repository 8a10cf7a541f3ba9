"""Messages between stages inside of a step: tensors of passes, and sums of gradients.

Eagerly each one is sent at once. Inside of a `tf.function` they are host functions, each of which
waits for the one before: they run in the order of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.transport import Transport, WaitTime
from ktrainer.distributed import World
from ktrainer.distributed.collectives import InOrder

_KINDS = ("activation", "gradient", "outputs")


class StageMessages:
    """Sends and receives the tensors of a step's passes, and sums tensors over stages.

    Args:
        world: the processes of one replica, in the order of stages.
        microbatches: the most that a step has.
        waits: accumulates the time spent waiting for other stages.

    Attributes:
        order: of messages; a step has one.
        failure: the error of a message, which TensorFlow raises as another one.
    """

    def __init__(self, world: World, microbatches: int, waits: WaitTime | None = None) -> None:
        self._world, self._of_sums = world, len(_KINDS) * microbatches
        self._transport = Transport(world, world.size, waits, channels=self._of_sums + 1)
        self.order = InOrder()
        self.failure: BaseException | None = None

    def run(
        self, function: Callable[..., Any], inputs: Sequence[Any], specs: Sequence[tf.TensorSpec]
    ) -> list[Any]:
        """The arrays that a host function returns, as tensors; it runs after the messages before.

        Args:
            function: gets arrays.
            specs: of the results.
        """

        def call(*arrays: np.ndarray) -> list[Any]:
            try:
                return [*(function(*arrays) or []), np.int32(0)]
            except BaseException as error:
                self.failure = error
                raise

        dtypes = [*(s.dtype for s in specs), tf.int32]
        *results, _ = self.order.on_host(call, list(inputs), dtypes)
        return [tf.ensure_shape(x, s.shape) for x, s in zip(results, specs, strict=True)]

    def send(
        self, kind: str, partitions: Sequence[int], microbatch: int, tensors: Sequence[Any]
    ) -> None:
        """Send tensors of a pass of a microbatch to other stages."""
        channel = _KINDS.index(kind) + len(_KINDS) * microbatch

        def send(*arrays: np.ndarray) -> None:
            for array in arrays:
                for partition in partitions:
                    self._transport.send_shaped(array, partition, channel, f"{kind} {microbatch}")

        if partitions and tensors:
            self.run(send, tensors, [])

    def receive(
        self, kind: str, partition: int, microbatch: int, specs: Sequence[tf.TensorSpec]
    ) -> list[Any]:
        """The tensors that another stage sends; nothing before the first one."""
        channel = _KINDS.index(kind) + len(_KINDS) * microbatch
        what = f"{kind} of microbatch {microbatch}"

        def receive() -> list[Any]:
            return [
                self._transport.receive_shaped(
                    s.shape.rank, s.dtype.as_numpy_dtype, partition, channel, what
                )
                for s in specs
            ]

        return self.run(receive, [], specs) if partition >= 0 and specs else []

    def wait(self) -> None:
        """Wait until what was sent has left; a host function."""
        self._transport.finish()

    def flush(self) -> None:
        """`wait`, in the order of messages."""
        self.run(self.wait, [], [])

    def sum(self, gradients: Sequence[Any], likes: Sequence[Any], what: str) -> list[Any]:
        """Sums of gradients over stages, which all make this call.

        The first stage adds up, in the order of stages, and sends the sum to the others: so all
        have the same bits. Slices are joined if no stage has anything else.

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
            self._transport.send_shaped(array, partition, self._of_sums, what)

        def receive(like: np.ndarray, partition: int) -> np.ndarray:
            return self._transport.receive_shaped(
                like.ndim, like.dtype, partition, self._of_sums, what
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

        return self.run(exchange, tensors, specs)


def _shape_of(like: Any) -> tf.Tensor:
    shape = tf.TensorShape(like.shape)
    known = shape.is_fully_defined()
    return tf.constant(shape.as_list(), tf.int64) if known else tf.shape(like, tf.int64)
