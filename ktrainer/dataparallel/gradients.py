"""Reduction of a step's gradients, as the tape and the optimizer do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ktrainer.dataparallel.host_calls import ranks_now
from ktrainer.dataparallel.local_variables import LocalVariables
from ktrainer.dataparallel.options import (
    Compression,
    ReduceOp,
    bucket_megabytes,
    checked_compression,
    checked_op,
    refuse_devices,
)
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.reductions import reduce_list
from ktrainer.dataparallel.state import group_of
from ktrainer.errors import ConfigError, ModelError
from ktrainer.steps.embedding_gradients import CommonSlices, mark_common
from ktrainer.steps.step_context import current_step, with_shape_of


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced over ranks.

    Attributes:
        operation: names it in messages.
        op, compression, sparse_as_dense, bucket_mb, process_set: the arguments of the tape and the
            optimizer.
        local: variables whose gradients stay this rank's own.
    """

    operation: str
    op: ReduceOp
    compression: Compression
    sparse_as_dense: bool
    bucket_mb: float
    process_set: ProcessSet | None
    local: LocalVariables = field(default_factory=LocalVariables, compare=False)

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of `variables`, reduced over ranks; None stays None.

        Those of local variables are divided by the number of ranks at most.

        Raises:
            ModelError: a Trainer runs this step, and reduces its gradients itself.
        """
        _refuse_in_trainer(self.operation)
        group, found = group_of(self.process_set), list(gradients)
        own = {k for k, variable in enumerate(variables) if variable in self.local}
        size = 1 if group.single or not own else ranks_now(group)[1]
        for k in own:
            found[k] = self.local.scaled(found[k], size)
        present = [k for k, gradient in enumerate(found) if gradient is not None and k not in own]
        if group.single or len(own) == len(found):
            return found
        shaped = [_shaped(found[k], variables[k]) for k in present]
        if self.sparse_as_dense:
            shaped = [tf.convert_to_tensor(gradient) for gradient in shaped]
        elif self.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            shaped = [_marked(gradient) for gradient in shaped]
        if not present:  # others may have some, and wait for this rank
            shaped = [tf.zeros([])]
        operation = self._operation(present, len(found))
        reduced = reduce_list(
            group.gradients, shaped, self.op, operation, self.compression, self.bucket_mb
        )[: len(present)]
        for k, gradient in zip(present, reduced, strict=True):
            found[k] = _without_marks(gradient)
        return found

    def _operation(self, present: Sequence[int], count: int) -> str:
        """The operation that ranks compare: with gradients of other variables it is another one."""
        if len(present) == count:
            return self.operation
        which = f"numbers {', '.join(map(str, present))}" if present else "none"
        return f"{self.operation}, of {count} variables those of {which}"


def make_reduction(
    operation: str,
    *,
    compression: Any,
    op: Any,
    sparse_as_dense: bool,
    bucket_cap_mb: float,
    process_set: ProcessSet | None,
    device_dense: str,
    device_sparse: str,
    gradient_predivide_factor: float,
    scale_local_gradients: bool,
) -> GradientReduction:
    """A reduction with checked settings.

    Raises:
        ConfigError: one of them cannot be.
    """
    refuse_devices(device_dense, device_sparse)
    op = checked_op(op)
    if gradient_predivide_factor != 1 and op is not ReduceOp.AVERAGE:
        raise ConfigError(
            "it splits the division of an average, so it needs op=Average. Leave it out.",
            path="gradient_predivide_factor",
            value=gradient_predivide_factor,
        )
    group_of(process_set)
    return GradientReduction(
        operation,
        op,
        checked_compression(compression),
        sparse_as_dense,
        bucket_megabytes(bucket_cap_mb),
        process_set,
        LocalVariables(scale_local_gradients),
    )


def _shaped(gradient: Any, variable: Any) -> Any:
    """A gradient with the static shape of what it is of, which some have forgotten."""
    return with_shape_of(gradient, variable) if hasattr(variable, "shape") else gradient


def _marked(gradient: Any) -> Any:
    """The slices of rows looked up once a batch, such as positions, with one of index -1 added:
    ranks may have different numbers of them, and may know so or not."""
    slices = mark_common(gradient, None)
    if not isinstance(slices, CommonSlices):
        return gradient
    values = tf.concat([slices.values, tf.zeros_like(slices.values[:1])], 0)
    indices = tf.concat([slices.indices, tf.constant([-1], slices.indices.dtype)], 0)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _without_marks(gradient: Any) -> Any:
    """Gathered slices without marks; where each rank has marked the same ones, their sums: Adam and
    its like square each slice by itself."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient

    def unmarked() -> tuple[tf.Tensor, tf.Tensor]:
        own = gradient.indices >= 0
        values = tf.boolean_mask(gradient.values, own)
        indices = tf.boolean_mask(gradient.indices, own)
        ranks, total = tf.size(own) - tf.size(indices), tf.size(indices)
        count = total // ranks
        repeated = tf.cast(tf.range(total) % tf.maximum(count, 1), indices.dtype)
        same = (total == count * ranks) & tf.reduce_all(indices == repeated)
        parts = tf.where(same, ranks, 1)
        shape = tf.concat([[parts, total // parts], tf.shape(values)[1:]], 0)
        return tf.reduce_sum(tf.reshape(values, shape), 0), indices[: total // parts]

    values, indices = tf.cond(
        tf.reduce_any(gradient.indices < 0),
        unmarked,
        lambda: (tf.identity(gradient.values), tf.identity(gradient.indices)),
    )
    values = tf.ensure_shape(values, [None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _refuse_in_trainer(operation: str) -> None:
    if current_step() is not None:
        raise ModelError(
            f"{operation}: ktrainer's Trainer runs this step, and sums its gradients over ranks "
            "already. Take the plain tape and optimizer in a model that a Trainer fits; "
            "DistributedGradientTape and DistributedOptimizer are for loops of your own."
        )
