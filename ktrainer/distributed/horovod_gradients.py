"""Gradients over Horovod: NCCL on GPUs, MPI or Gloo on CPUs.

Each gradient is an all-reduce of its own, started as soon as the backward pass has made it;
Horovod's background thread fuses what is ready and runs it beside the rest of the pass. It pairs
the ranks' tensors by name, so names are numbered within a trace: ranks trace at different times.
The scope in which TensorFlow traces a collective is not part of its name: with several steps in a
call, a rank with an example more or fewer may trace them in other scopes. Only Horovod's core is
used: its Keras layer averages nothing on Keras 3.

Horovod adds 16-bit floats up in 16 bits, and has none of type bfloat16. So those are exchanged as
bits and added up here, in float32 and in the order of ranks, which sends as many bytes as its
all-reduce and gives the bits of the MPI engine:

    each rank gets its segment from all others     all-to-all of 16 bits
    it adds them up, and rounds the sum
    each rank sends its sum to all others          all-gather of 16 bits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import tensorflow as tf

from ktrainer.distributed.collectives import (
    Gradient,
    GradientCollectives,
    InOrder,
    weighted,
    widened,
    wire_type,
)
from ktrainer.distributed.deadlines import WaitWatchdog
from ktrainer.distributed.horovod_world import (
    ask_for_hierarchical_sums,
    initialised_horovod,
    process_set_of,
)
from ktrainer.distributed.world import World
from ktrainer.errors import PeerLost, WorldError

_SMALL_BYTES = 2**16  # an all-to-all of its own takes longer than copying that much


class HorovodGradients(GradientCollectives):
    """Sums gradients over Horovod's ranks, or a group of them.

    Args:
        world: the processes; Horovod must see the same ones.
        compression: `"none"`, or `"fp16"` or `"bf16"` for 16-bit floats on the wire.
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
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        # A stopped rank stops Horovod's threads on all ranks, and with them Horovod's own deadline.
        self._watchdog = WaitWatchdog(world, "sums over ranks through Horovod")

    def reduce(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        order: InOrder,
        *,
        compressed: bool = True,
    ) -> list[Gradient]:
        if not gradients:
            return []
        self._mark(self._watchdog.begin, gradients[-1:])  # usually the first to be computed
        if self.sparse_as_dense:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        reduced: list[Gradient] = list(gradients)
        compression = self.compression if compressed else "none"
        for group in self._groups(gradients, compression):
            parts, number = [gradients[i] for i in group], order.number()
            wire = wire_type(parts[0].dtype, compression)
            if isinstance(parts[0], tf.IndexedSlices):
                totals = [self._reduce_slices(parts[0], weight, wire, number)]
            elif wire is not None:
                totals = self._reduce_halves(parts, weight, wire, number)
            else:
                totals = [self._reduce(parts[0], weight, number)]
            for i, total in zip(group, totals, strict=True):
                reduced[i] = total
        self._mark(self._watchdog.end, reduced)
        return reduced

    def _groups(self, gradients: Sequence[Gradient], compression: str) -> list[list[int]]:
        """Indices of gradients that are sent as one: of 16 bits all small ones, which Horovod does
        not fuse."""
        groups: list[list[int]] = []
        small: dict[tf.DType, list[int]] = {}
        for i, gradient in enumerate(gradients):
            wire = wire_type(gradient.dtype, compression)
            fused = wire is not None and not isinstance(gradient, tf.IndexedSlices)
            if fused and 2 * (gradient.shape.num_elements() or 0) <= _SMALL_BYTES:
                if wire not in small:
                    groups.append(small.setdefault(wire, []))
                small[wire].append(i)
            else:
                groups.append([i])
        return groups

    def _mark(self, call: Callable[[], None], after: Sequence[Gradient]) -> None:
        """Call `call` in the step, once `after` have been computed."""

        def mark() -> np.bool_:
            call()
            return np.bool_(True)

        every = [g.values if isinstance(g, tf.IndexedSlices) else g for g in after]
        with tf.control_dependencies(every):
            tf.numpy_function(mark, [], tf.bool, stateful=True)

    def _reduce(self, gradient: tf.Tensor, weight: tf.Tensor, number: int) -> tf.Tensor:
        return self._hvd.allreduce(
            weighted(gradient, weight),
            op=self._hvd.Sum,
            name=f"ktrainer.gradient.{number}",
            process_set=self._set,
            ignore_name_scope=True,
        )

    def _reduce_halves(
        self, gradients: list[tf.Tensor], weight: tf.Tensor, wire: tf.DType, number: int
    ) -> list[tf.Tensor]:
        """The sums of dense gradients of one type on the wire."""
        wide = [weighted(tf.cast(gradient, tf.float32), weight) for gradient in gradients]
        sizes = [tf.size(part) for part in wide]
        packed = tf.concat([tf.reshape(part, [-1]) for part in wide], 0)
        length = tf.maximum(-(-tf.size(packed) // self.size), 1)  # of a segment
        padded = tf.pad(packed, [[0, length * self.size - tf.size(packed)]])
        segments = _as_bits(tf.reshape(padded, [self.size, length]), wire)
        exchanged = self._hvd.alltoall(
            segments,
            name=f"ktrainer.gradient.{number}.segments",
            ignore_name_scope=True,
            process_set=self._set,
        )
        parts = tf.unstack(_from_bits(tf.reshape(exchanged, [self.size, length]), wire), self.size)
        sums = self._gather(_as_bits(reduce(tf.add, parts), wire), f"ktrainer.gradient.{number}")
        totals = tf.split(_from_bits(sums[: tf.size(packed)], wire), sizes)
        return [
            tf.cast(tf.reshape(total, tf.shape(gradient)), gradient.dtype)
            for total, gradient in zip(totals, gradients, strict=True)
        ]

    def _reduce_slices(
        self, slices: tf.IndexedSlices, weight: tf.Tensor, wire: tf.DType | None, number: int
    ) -> tf.IndexedSlices:
        name = f"ktrainer.rows.{number}"
        # Padding has weight 0, so its rows add nothing wherever they go.
        values = weighted(slices.values, weight)
        if wire is None:
            values = self._gather(values, f"{name}.values")
        else:
            values = _from_bits(self._gather(_as_bits(values, wire), f"{name}.values"), wire)
        indices = self._gather(slices.indices, f"{name}.indices")
        return tf.IndexedSlices(tf.cast(values, slices.values.dtype), indices, slices.dense_shape)

    def _gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._hvd.allgather(tensor, name=name, process_set=self._set, ignore_name_scope=True)

    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        name = f"ktrainer.forward.{order.number()}"
        self._mark(self._watchdog.begin, [vector])
        total = self._hvd.allreduce(
            widened(vector),  # Horovod has no bfloat16
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


def _as_bits(tensor: tf.Tensor, wire: tf.DType) -> tf.Tensor:
    """`tensor` rounded to a 16-bit type, under the name of the one that Horovod knows."""
    return tf.bitcast(tf.cast(tensor, wire), tf.float16)


def _from_bits(tensor: tf.Tensor, wire: tf.DType) -> tf.Tensor:
    """The float32 values of what `_as_bits` has made."""
    return tf.cast(tf.bitcast(tensor, wire), tf.float32)
