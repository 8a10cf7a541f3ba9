"""A gradient tape whose gradients are reduced over ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ktrainer.dataparallel.gradients import make_reduction
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.errors import ModelError


class DistributedGradientTape(tf.GradientTape):
    """A tape that shares the state of another one, and reduces what `gradient` returns.

    ```python
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    ```

    Args:
        gradtape: the tape, before or after it has recorded; it may be persistent.
        device_dense, device_sparse: refused if given.
        compression: the type of gradients on the wire.
        sparse_as_dense: make IndexedSlices dense first; else the rows of all ranks are gathered.
        op: default: `ReduceOp.AVERAGE`.
        gradient_predivide_factor: with an average; gives the same numbers: gradients are divided
            by the number of ranks before they are summed.
        num_groups, groups: change nothing: gradients are fused by size.
        process_set: the ranks; default: all.
        bucket_cap_mb: largest fused buffer, in MiB; a multiple of 128 bytes.

    Raises:
        ConfigError: an argument cannot be.
        ModelError: `gradtape` is no tape.
    """

    __slots__ = ("_reduction",)

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Compression = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet | None = None,
        *,
        bucket_cap_mb: float = 25,
    ) -> None:
        """Share the state of a tape."""
        self._reduction = make_reduction(
            "all-reduce of a tape's gradients",
            compression=compression,
            op=op,
            sparse_as_dense=sparse_as_dense,
            bucket_cap_mb=bucket_cap_mb,
            process_set=process_set,
            device_dense=device_dense,
            device_sparse=device_sparse,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        object.__setattr__(self, "__dict__", _state_of(gradtape))  # both are one tape

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of `target`, reduced over ranks, in the structure of `sources`.

        A source without a gradient has None, on every rank alike.
        """
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        # None is a leaf; IndexedSlices would be flattened further with `expand_composites`.
        reduced = self._reduction(tf.nest.flatten(found), flat)
        return tf.nest.pack_sequence_as(sources, reduced)


def _state_of(tape: Any) -> dict[str, Any]:
    if not isinstance(tape, tf.GradientTape):
        raise ModelError(
            f"DistributedGradientTape wraps a tf.GradientTape, not {type(tape).__name__}."
        )
    return vars(tape)
