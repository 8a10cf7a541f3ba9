"""Gradients over Horovod: NCCL on GPUs, MPI or Gloo on CPUs.

Each gradient is an all-reduce of its own, started as soon as the backward pass has made it;
Horovod's background thread fuses what is ready and runs it beside the rest of the pass. It pairs
the ranks' tensors by name, so names are numbered within a trace: ranks trace at different times.
The scope in which TensorFlow traces a collective is not part of its name: with several steps in a
call, a rank with an example more or fewer may trace them in other scopes. Only Horovod's core is
used: its Keras layer averages nothing on Keras 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ktrainer.distributed.collectives import Gradient, GradientCollectives, InOrder, weighted
from ktrainer.distributed.deadlines import WaitWatchdog
from ktrainer.distributed.horovod_world import (
    ask_for_hierarchical_sums,
    initialised_horovod,
    process_set_of,
)
from ktrainer.distributed.world import World
from ktrainer.errors import PeerLost, WorldError


class HorovodGradients(GradientCollectives):
    """Sums gradients over Horovod's ranks, or a group of them.

    Args:
        world: the processes; Horovod must see the same ones.
        compression: `"none"`, or `"fp16"` for 16-bit floats on the wire.
        sparse_as_dense: turn IndexedSlices into dense tensors before reducing them; otherwise
            their rows are gathered from all ranks.
        ranks: sum over these ranks of `world` only; default: all.
        all_groups: with `ranks`, the groups of all ranks, in the same order on every rank. Every
            rank must make one for its group at the same time.
        hierarchical: ask for NCCL within each host first, if Horovod has not started yet.
    """

    name = "horovod"
    seconds = None  # Horovod's thread waits, not the step; for how long is unknown

    def __init__(
        self,
        world: World,
        compression: str = "none",
        sparse_as_dense: bool = False,
        ranks: Sequence[int] | None = None,
        all_groups: Sequence[Sequence[int]] = (),
        hierarchical: bool = False,
    ) -> None:
        if hierarchical:
            ask_for_hierarchical_sums()
        self._set = None if ranks is None else process_set_of(world, ranks, all_groups)
        self._hvd = initialised_horovod(world.deadline)
        self._set = self._set or self._hvd.global_process_set
        if (self._hvd.rank(), self._hvd.size()) != (world.rank, world.size):
            raise WorldError(
                f"Horovod sees rank {self._hvd.rank()} of {self._hvd.size()}, MPI rank "
                f"{world.rank} of {world.size}: Horovod was built against another MPI. Build it "
                "again with `ktrainer horovod build`, or use backend.engine=mpi."
            )
        self.world = world
        self.size = world.size if ranks is None else len(ranks)
        self._compression = getattr(self._hvd.Compression, compression)
        self.sparse_as_dense = sparse_as_dense
        # A stopped rank stops Horovod's threads on all ranks, and with them Horovod's own deadline.
        self._watchdog = WaitWatchdog(world, "sums over ranks through Horovod")

    def reduce(
        self, gradients: Sequence[Gradient], weight: tf.Tensor, order: InOrder
    ) -> list[Gradient]:
        if not gradients:
            return []
        self._mark(self._watchdog.begin, gradients[-1:])  # usually the first to be computed
        reduced = [self._reduce(gradient, weight, order.number()) for gradient in gradients]
        self._mark(self._watchdog.end, reduced)
        return reduced

    def _mark(self, call: Callable[[], None], after: Sequence[Gradient]) -> None:
        """Call `call` in the step, once `after` have been computed."""

        def mark() -> np.bool_:
            call()
            return np.bool_(True)

        every = [g.values if isinstance(g, tf.IndexedSlices) else g for g in after]
        with tf.control_dependencies(every):
            tf.numpy_function(mark, [], tf.bool, stateful=True)

    def _reduce(self, gradient: Gradient, weight: tf.Tensor, number: int) -> Gradient:
        if self.sparse_as_dense:
            gradient = tf.convert_to_tensor(gradient)
        if isinstance(gradient, tf.IndexedSlices):
            name = f"ktrainer.rows.{number}"
            # Padding has weight 0, so its rows add nothing wherever they go.
            values = _widened(weighted(gradient.values, weight))
            wire, context = self._compression.compress(values)
            values = self._compression.decompress(self._gather(wire, f"{name}.values"), context)
            values = tf.cast(values, gradient.values.dtype)
            indices = self._gather(gradient.indices, f"{name}.indices")
            return tf.IndexedSlices(values, indices, gradient.dense_shape)
        total = self._hvd.allreduce(
            _widened(weighted(gradient, weight)),
            op=self._hvd.Sum,
            name=f"ktrainer.gradient.{number}",
            compression=self._compression,
            process_set=self._set,
            ignore_name_scope=True,
        )
        return tf.cast(total, gradient.dtype)

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allgather(tensor, name=name, process_set=self._set, ignore_name_scope=True)

    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        name = f"ktrainer.forward.{order.number()}"
        self._mark(self._watchdog.begin, [vector])
        total = self._hvd.allreduce(
            _widened(vector),
            op=self._hvd.Sum,
            name=name,
            process_set=self._set,
            ignore_name_scope=True,
        )
        self._mark(self._watchdog.end, [total])
        return tf.cast(total, vector.dtype)

    def close(self) -> None:
        self._watchdog.close()

    def failure(self, error: BaseException) -> BaseException | None:
        self._watchdog.reset()
        if "Horovod" not in str(error):
            return None
        return PeerLost(
            f"rank {self.world.rank} lost a peer, or waited over {self.world.deadline:g} s for "
            f"it, at step {self.world.step} in 'all-reduce of gradients' through Horovod"
        )


def _widened(tensor: tf.Tensor) -> tf.Tensor:
    """16-bit floats as float32: Horovod has no bfloat16, and their sums are better so."""
    return tf.cast(tensor, tf.float32) if tensor.dtype.size == 2 else tensor
