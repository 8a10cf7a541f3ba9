"""A Keras 3 optimizer that reduces gradients over ranks before all else.

`DistributedOptimizer` changes the instance that it gets: only its `apply` is another, so its class,
configuration and variables are the same, and a saved model loads where ktrainer is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

from ktrainer.dataparallel.gradients import GradientReduction, make_reduction
from ktrainer.dataparallel.keras_hooks import hook_keras, is_distributed, reducing
from ktrainer.dataparallel.local_variables import refuse_mixed, variables_of_layers
from ktrainer.dataparallel.options import Compression, ReduceOp
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.state import opened
from ktrainer.errors import ConfigError, ModelError
from ktrainer.runtime.autograph import rewritten_by_autograph


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compression = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
    bucket_cap_mb: float = 25,
) -> Any:
    """Let a Keras 3 optimizer reduce gradients over ranks, first of all, and then apply them.

    Clipping and the check of a loss scale see reduced gradients. It works in custom loops,
    eagerly and in `tf.function`, and in `model.compile` and `model.fit`, where each rank gives its
    own data; XLA, which cannot communicate, is off there unless it is asked for.

    Args:
        optimizer: a Keras 3 optimizer; it is changed in place.
        name: names its reductions in messages.
        use_locking: changes nothing, as in Keras.
        backward_passes_per_step: add up the gradients of so many calls of `apply`, made dense,
            before they are reduced and applied: one update, and one iteration.
        average_aggregated_gradients: divide their sum by `backward_passes_per_step`.
        device_dense, device_sparse, compression, sparse_as_dense, op: as for the tape,
            `DistributedGradientTape`.
        gradient_predivide_factor, num_groups, groups, process_set, bucket_cap_mb: likewise.
        scale_local_gradients: divide gradients of the variables that were given to
            `optimizer.register_local_var(variable)` by the number of ranks.

    Returns:
        `optimizer` itself.

    Raises:
        ModelError: it is no Keras 3 optimizer, or is distributed already.
        ConfigError: an argument cannot be.
    """
    _check_optimizer(optimizer)
    reduction = make_reduction(
        f"all-reduce of gradients of {name or optimizer.name!r}",
        compression=compression,
        op=op,
        sparse_as_dense=sparse_as_dense,
        bucket_cap_mb=bucket_cap_mb,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        gradient_predivide_factor=gradient_predivide_factor,
        scale_local_gradients=scale_local_gradients,
    )
    if backward_passes_per_step < 1:
        raise ConfigError(
            "an update has at least one backward pass.",
            path="backward_passes_per_step",
            value=backward_passes_per_step,
        )
    aggregation = None
    if backward_passes_per_step > 1:
        aggregation = LocalAggregation(backward_passes_per_step, average_aggregated_gradients)
        opened().aggregations.append(aggregation)
    hook_keras(opened().replaced)
    optimizer.apply = MethodType(_make_apply(reduction, aggregation), optimizer)
    optimizer.register_local_var = reduction.local.add
    return optimizer


def PartialDistributedOptimizer(
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """A DistributedOptimizer that leaves the gradients of some layers a rank's own.

    They are divided by the number of ranks, unless `scale_local_gradients=False`.

    Args:
        optimizer: a Keras 3 optimizer without `global_clipnorm`, and no LossScaleOptimizer: both
            decide on all gradients at once, and ranks would decide differently.
        local_layers: a built Keras layer, or several; default: none. Single variables are given to
            `optimizer.register_local_var(variable)`, before the first step.
        *args, **kwargs: as for `DistributedOptimizer`.

    Raises:
        ModelError: one of `local_layers` is no layer, or is not built.
    """
    local = variables_of_layers(local_layers)
    optimizer = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in local:
        optimizer.register_local_var(variable)
    return optimizer


def _make_apply(reduction: GradientReduction, aggregation: LocalAggregation | None) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        gradients = list(grads)
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        refuse_mixed(self, variables, reduction.local)
        original = rewritten_by_autograph(type(self).apply)

        def update(found: list[Any]) -> None:
            with reducing() as first:
                found = reduction(found, variables) if first else found
                original(self, found, trainable_variables)

        if aggregation is None:
            update(gradients)
            return
        if not self.built:
            self.build(variables)
        aggregation.add(gradients, variables, update)

    # None: not that of a single call.
    apply.ktrainer_reduction = None if aggregation else reduction  # type: ignore[attr-defined]
    return apply


def _check_optimizer(optimizer: Any) -> None:
    opened()
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ModelError(
            f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__module__}."
            f"{type(optimizer).__name__}. Use one of keras.optimizers; with optimizers of "
            "TensorFlow 1, wrap the tape: DistributedGradientTape."
        )
    if is_distributed(optimizer):
        raise ModelError(
            f"the optimizer {optimizer.name!r} is distributed already: gradients would be reduced "
            "twice. Call DistributedOptimizer once for each optimizer."
        )


class LocalAggregation:
    """Sums of gradients, kept in variables of its own, which no model or checkpoint holds.

    Args:
        passes: how many gradients of each variable make an update.
        average: whether their sum is divided by `passes`.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._sums: list[tf.Variable | None] = []
        self._of: list[Any] = []  # the variables that they are of
        self._count: tf.Variable | None = None

    def add(
        self, gradients: list[Any], variables: list[Any], update: Callable[[list[Any]], None]
    ) -> None:
        """Add gradients; every so many times call `update` with their sums, and begin again.

        Raises:
            ModelError: other variables have gradients than before.
        """
        if self._count is None:
            self._of = list(variables)
            with tf.init_scope():
                self._sums = [
                    None if g is None else tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                    for g, v in zip(gradients, variables, strict=True)
                ]
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
        others = list(map(id, variables)) != list(map(id, self._of))
        if others or [g is None for g in gradients] != [s is None for s in self._sums]:
            raise ModelError(
                "with backward_passes_per_step the same variables must have gradients in every "
                f"pass; {'there are others' if others else 'others have None'} now. Give each pass "
                "the same variables and losses, and each optimizer its own variables."
            )
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        count = self._count.assign_add(1)
        is_last = tf.equal(count % self._passes, 0)
        if tf.executing_eagerly():
            if is_last:
                self._take(update)
        else:
            tf.cond(is_last, lambda: self._take(update), lambda: False)

    @property
    def begun(self) -> bool:
        """Whether gradients were added since the last update."""
        return self._count is not None and int(self._count) % self._passes != 0

    def reset(self) -> None:
        """Forget gradients that were added since the last update."""
        for variable in (*self._sums, self._count):
            if variable is not None:
                variable.assign(tf.zeros_like(variable))

    def _take(self, update: Callable[[list[Any]], None]) -> bool:
        divisor = self._passes if self._average else 1
        taken = [None if s is None else tf.identity(s) / divisor for s in self._sums]
        update(taken)
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))
        return True
