"""Gradients over plain MPI, summed through mpi4py, without an extension to compile.

Dense gradients are grouped into buckets of at most `bucket_mb`, in the reverse order of the
variables, which is about the order in which the backward pass finishes them. Each bucket is one
host function, which starts when its last gradient is there and the previous bucket is summed, and
which sums gradients where they are: TensorFlow's memory is MPI's buffer, without a copy. See
`_private` for why nothing else reads that memory.

16-bit gradients, and all floats under `compression="fp16"` or `"bf16"`, cross the wire as 16 bits
and are added up in float32, a piece at a time: no buffer is larger than that.

Ranks of one host exchange gradients through memory that they share, if they have it, those of
several by messages; see `ktrainer.distributed.shared_memory` and
`ktrainer.distributed.sum_in_place`, which give equal bits.
With ranks on several hosts, dense gradients are summed within each host first, in which 16 bits are
widened; see `ktrainer.distributed.host_groups`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any, cast

import numpy as np
import tensorflow as tf
from mpi4py import MPI

from ktrainer.distributed.bucket_sizes import LARGEST, BucketSizes, choose_bucket_sizes
from ktrainer.distributed.collectives import (
    Gradient,
    GradientCollectives,
    InOrder,
    keep_outside_xla,
    wire_type,
)
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.distributed.host_groups import HostGroups, open_host_groups
from ktrainer.distributed.mpi_communicator import MpiComm
from ktrainer.distributed.mpi_rows import gather_rows
from ktrainer.distributed.shared_memory import SharedMemory, open_shared_memory, rows_at_once
from ktrainer.distributed.sixteen_bits import convert
from ktrainer.distributed.sum_in_place import reduce_in_pieces, sum_in_place, weigh
from ktrainer.state.trace_spans import COLLECTIVES, add_span, is_tracing


@dataclass(eq=False)
class Communicators:
    """Communicators of the ranks; others take their place here when the ranks change.

    Attributes:
        comm: of all ranks.
        hosts: groups of them by host, if sums are hierarchical.
        shared: memory of all of them, if they have it.
    """

    comm: MPI.Intracomm = field(default_factory=lambda: cast(MPI.Intracomm, MPI.COMM_NULL))
    hosts: HostGroups | None = None
    shared: SharedMemory | None = None


class MpiGradients(GradientCollectives):
    """Sums gradients over the ranks of `world`.

    Args:
        world: the processes, or a group of them; gradients use a communicator of their own.
        bucket_mb: largest bucket, in MiB (a gradient larger than this is a bucket of its own);
            None: as suits the links between hosts, with a smaller first bucket.
        compression: `"none"`, or `"fp16"` or `"bf16"` for 16-bit floats on the wire.
        sparse_as_dense: turn IndexedSlices into dense tensors before reducing them; otherwise
            their rows are gathered from all ranks.
        hierarchical: sum within each host first, where that saves traffic between hosts.
    """

    name = "mpi"
    seconds: float = 0.0

    def __init__(
        self,
        world: MpiComm,
        bucket_mb: float | None = LARGEST,
        compression: str = "none",
        sparse_as_dense: bool = False,
        hierarchical: bool = True,
    ) -> None:
        self.world = world
        self._hierarchical = hierarchical
        self._communicators = Communicators()
        self.open()
        if isinstance(world, ElasticWorld):
            self.atomic = True
            world.on_change.append(self.open)
        sizes = BucketSizes(bucket_mb, bucket_mb) if bucket_mb is not None else self._choose_sizes()
        self.set_wire(compression, sizes)
        self.sparse_as_dense = sparse_as_dense

    def set_wire(self, compression: str, sizes: BucketSizes) -> None:
        """Set what floats are sent as, and the largest buckets."""
        self.compression = compression
        self._first_bytes, self._bucket_bytes = (int(size * 2**20) for size in sizes)

    def _choose_sizes(self) -> BucketSizes:
        """The sizes that suit the links; on healing worlds those that were chosen first, which the
        steps of all ranks are compiled with."""
        if not isinstance(self.world, ElasticWorld):
            return choose_bucket_sizes(self.world, self._hierarchical)
        if self.world.bucket_sizes is None:
            self.world.bucket_sizes = choose_bucket_sizes(self.world, self._hierarchical)
        return BucketSizes(*self.world.bucket_sizes)

    def open(self) -> None:
        """Open communicators of the world's ranks; again when these have changed."""
        comm = self._communicators.comm = self.world.duplicate()
        hosts = open_host_groups(self.world) if self._hierarchical else None
        shared = open_shared_memory(self.world, comm) if hosts is None else None
        self._communicators.hosts, self._communicators.shared = hosts, shared
        self.size, self.error = comm.size, None  # that of the ranks before is no cause of another

    @property
    def communicators(self) -> Communicators:
        """The communicators of the present ranks.

        Raises:
            WorldError: a wait of the world has been interrupted.
        """
        self.world.check_usable()
        return self._communicators

    def reduce(
        self,
        gradients: Sequence[Gradient],
        weight: tf.Tensor,
        order: InOrder,
        *,
        compressed: bool = True,
    ) -> list[Gradient]:
        gradients = [tf.convert_to_tensor(g) if self.sparse_as_dense else g for g in gradients]
        reduced: list[Gradient] = list(gradients)
        for bucket in self._buckets(gradients):
            parts = [gradients[i] for i in bucket]
            if isinstance(parts[0], tf.IndexedSlices):
                outputs = [self._reduce_slices(parts[0], weight, order)]
            else:
                outputs = self._reduce_bucket(parts, weight, order, compressed)
            for i, output in zip(bucket, outputs, strict=True):
                reduced[i] = output
        return reduced

    def sum(self, vector: tf.Tensor, order: InOrder) -> tf.Tensor:
        narrow = wire_type(vector.dtype, "none")
        vector = tf.cast(vector, tf.float32) if narrow else vector
        call = self._timed(self._sum_array)
        (total,) = order.on_host(call, [vector], [vector.dtype])
        total = tf.ensure_shape(total, vector.shape)
        return tf.cast(total, narrow) if narrow else total

    def rank_and_size(self, rank: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if not self.atomic:
            return super().rank_and_size(rank)

        def now() -> np.ndarray:  # the step is not compiled again when ranks change
            comm = self._communicators.comm
            return np.array([comm.rank, comm.size], np.int32)

        found = tf.ensure_shape(tf.numpy_function(now, [], tf.int32, stateful=True), [2])
        return found[0], found[1]

    def reduce_in_place(self, arrays: Sequence[np.ndarray], weight: float) -> None:
        self._timed(self.sum_bucket)(np.array(weight), *arrays)

    def close(self) -> None:
        if isinstance(self.world, ElasticWorld) and self.open in self.world.on_change:
            self.world.on_change.remove(self.open)
        opened = self._communicators
        if opened.hosts is not None:
            opened.hosts.close()
        opened.shared = None  # frees it: TensorFlow may keep compiled functions, and so this object
        self.world.free(opened.comm)

    def _buckets(self, gradients: Sequence[Gradient]) -> list[list[int]]:
        """Indices of gradients, last variable first: dense ones grouped by dtype and size."""
        buckets: list[list[int]] = []
        open_bucket: dict[tf.DType, tuple[list[int], int, int]] = {}
        for i in reversed(range(len(gradients))):
            gradient = gradients[i]
            if isinstance(gradient, tf.IndexedSlices):
                buckets.append([i])
                continue
            nbytes = (gradient.shape.num_elements() or 0) * gradient.dtype.size
            empty: tuple[list[int], int, int] = ([], 0, self._first_bytes)
            bucket, filled, most = open_bucket.get(gradient.dtype, empty)
            if bucket and filled + nbytes > most:
                bucket, filled, most = [], 0, self._bucket_bytes
            if not bucket:
                buckets.append(bucket)
            bucket.append(i)
            open_bucket[gradient.dtype] = (bucket, filled + nbytes, most)
        return buckets

    def _wire_of(self, dtype: Any, compressed: bool = True) -> np.dtype | None:
        """The 16-bit type in which tensors of `dtype` are sent; None: unchanged."""
        wire = wire_type(tf.as_dtype(dtype), self.compression if compressed else "none")
        return None if wire is None else np.dtype(wire.as_numpy_dtype)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to `seconds`, in the trace of profiled steps too, and its
        exception kept in `error`."""

        def timed(*arrays: np.ndarray) -> Any:
            start = time.perf_counter()
            try:
                return call(*arrays)
            except BaseException as error:
                self.error = error
                raise
            finally:
                end = time.perf_counter()
                self.seconds += end - start
                if is_tracing():
                    megabytes = sum(np.asarray(array).nbytes for array in arrays) / 1e6
                    name = f"{_SAID.get(call.__name__, call.__name__)}, {megabytes:.3g} MB"
                    add_span(COLLECTIVES, name, start, end)

        return timed

    def sum_uncompressed(self, weight: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        """`sum_bucket`, of what is no gradient."""
        return self.sum_bucket(weight, *arrays, compressed=False)

    def sum_bucket(
        self, weight: np.ndarray, *arrays: np.ndarray, compressed: bool = True
    ) -> list[np.ndarray]:
        """The sums over ranks of `weight * array`, at once; arrays are overwritten by them."""
        # TensorFlow gives scalars as NumPy's, which cannot be changed.
        found = [x if isinstance(x, np.ndarray) else np.array(x) for x in arrays]
        reduce_in_pieces(found, partial(self._sum_piece, weight, compressed))
        return found

    def _sum_piece(self, weight: np.ndarray, compressed: bool, array: np.ndarray) -> None:
        """Replace a flat array of at most `PIECE_BYTES` by its weighted sum over ranks."""
        wire = self._wire_of(array.dtype, compressed)
        wide = array
        if wire is not None and array.dtype != np.float32:
            wide = np.empty(array.size, np.float32)
            convert(array, wide)
        if weight == 0:
            wide.fill(0)
        factor = wide.dtype.type(weight or 1)
        hosts = self.communicators.hosts
        if wire is None and hosts is None:
            self._sum_over_ranks(array, "gradients", factor)
            return
        weigh(wide, factor)
        total = wide if wire is None else np.empty(wide.size, wire)
        what = "gradients" if wire is None else "16-bit gradients"
        if hosts is not None:
            hosts.sum(wide, total, what)
        else:
            if total is not wide:
                convert(wide, total)
            self._sum_over_ranks(total, what)
        if total is not array:
            convert(total, array)

    def _sum_over_ranks(self, array: np.ndarray, what: str, weight: float = 1.0) -> None:
        opened = self.communicators
        if opened.shared is not None:
            opened.shared.sum_in_place(array, what, weight)
        else:
            weigh(array, weight)
            sum_in_place(self.world, opened.comm, array, what)

    def _reduce_bucket(
        self, gradients: list[tf.Tensor], weight: tf.Tensor, order: InOrder, compressed: bool
    ) -> list[tf.Tensor]:
        """The sums of dense gradients of one dtype."""
        call = self._timed(self.sum_bucket if compressed else self.sum_uncompressed)
        parts = gradients
        if not tf.executing_eagerly():
            parts, call = _private(gradients), _in_shape(call, gradients)
        outputs = order.on_host(call, [weight, *parts], [part.dtype for part in parts])
        return [tf.reshape(x, _shape_of(g)) for x, g in zip(outputs, gradients, strict=True)]

    def _reduce_slices(
        self, slices: tf.IndexedSlices, weight: tf.Tensor, order: InOrder
    ) -> tf.IndexedSlices:
        gather = self._timed(self.gather_slices)
        dtypes = [slices.values.dtype, slices.indices.dtype]
        inputs = [weight, slices.values, slices.indices]
        values, indices = order.on_host(gather, inputs, dtypes)
        values.set_shape([None, *slices.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def gather_slices(
        self, weight: np.ndarray, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The weighted rows of all ranks and their indices, at once; none of a rank of weight 0."""
        if weight == 0:
            values, indices = values[:0], indices[:0]
        narrow = self._wire_of(values.dtype)
        # What is narrow, or will be, is weighted in float32.
        wide = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
        product = values.astype(wide, copy=False) * wide.type(weight)
        wire = product.astype(values.dtype if narrow is None else narrow, copy=False)
        found, where = self._gather_rows([wire, indices])
        return found.astype(values.dtype, copy=False), where

    def _gather_rows(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The rows of all ranks, of arrays that have as many each."""
        opened = self.communicators
        if opened.shared is not None and rows_at_once(arrays):
            return opened.shared.gather_rows(arrays, "sparse gradients")
        rows = np.empty(self.size, np.int64)
        mine = np.array([len(arrays[0])], np.int64)
        request = opened.comm.Iallgather(mine, rows)
        self.world.wait(request, "all-gather of row counts", mine, rows)
        return [gather_rows(self.world, opened.comm, array, rows) for array in arrays]

    def _sum_array(self, array: np.ndarray) -> np.ndarray:
        total = np.empty_like(array)
        request = self.communicators.comm.Iallreduce(array, total)
        self.world.wait(request, "all-reduce in the forward pass", array, total)
        return total


_SAID = {  # in a trace
    "sum_bucket": "sum of a bucket",
    "sum_uncompressed": "sum of statistics",
    "gather_slices": "rows of sparse gradients",
    "_sum_array": "sum in the forward pass",
}
_copies = count(1)


def _shape_of(gradient: tf.Tensor) -> Any:
    """The shape of a gradient, without reading it where that is known."""
    known = gradient.shape.is_fully_defined()
    return gradient.shape if known else tf.shape(gradient)


def _in_shape(call: Callable[..., Any], gradients: Sequence[tf.Tensor]) -> Callable[..., Any]:
    """A host function of flat arrays: `call` with those in the shapes of gradients, if known."""
    shapes = [g.shape.as_list() if g.shape.is_fully_defined() else [-1] for g in gradients]

    def shaped(weight: np.ndarray, *flat: np.ndarray) -> Any:
        return call(weight, *(x.reshape(s) for x, s in zip(flat, shapes, strict=True)))

    return shaped


@cache
def _flat_shape() -> tf.Tensor:
    """The handle of a variable that is [-1], which TensorFlow does not know as it optimizes a step,
    nor that it has one element."""
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[None], shared_name="ktrainer_flat")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant([-1]))
        return handle


def _private(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients, flat, in memory that is read by what they are given to and by nothing else.

    A snapshot is a copy, unless TensorFlow finds that nothing else will read the memory of its
    input and hands that on, which is the usual case. Its optimizer could still let two readers have
    one snapshot: by making equal ones once (each has an attribute of its own), or by replacing that
    of a constant by the constant (nothing of the shape that it is given is known before the step;
    with their own shapes after it, the snapshots would not stay).
    """
    shape = tf.raw_ops.ReadVariableOp(resource=_flat_shape(), dtype=tf.int32)
    keep_outside_xla(shape.op)
    snapshots = []
    for gradient in gradients:
        flat = tf.raw_ops.Reshape(tensor=gradient, shape=shape)
        snapshot = tf.raw_ops.Snapshot(input=flat)
        snapshot.op._set_attr("_ktrainer_copy", tf.compat.v1.AttrValue(i=next(_copies)))
        for op in (flat.op, snapshot.op):
            keep_outside_xla(op)
        snapshots.append(snapshot)
    return snapshots
