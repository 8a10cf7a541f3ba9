"""Patches of Keras under which a traced step computes one part of a larger batch.

Keras 3 has no interface for a distribution that is not its own, so `keras_patches(context)`
replaces a few functions of Keras for as long as a step is traced, in the threads that trace it, and
puts them back:

| replaced | because |
|---|---|
| `losses.loss.reduce_weighted_values` | each loss is divided by its denominator over all parts |
| `Model._aggregate_additional_loss` | a vector given to `add_loss` is summed over all parts |
| `tf.GradientTape.gradient` | so is a vector that is differentiated |
| `tf.linalg.global_norm`, `tf.clip_by_norm`, `..._value` | gradients have the norm of their sums |
| `tf.map_fn`, `tf.vectorized_map`, `tf.while_loop` | but those of single examples have not |
| `metrics.Mean.update_state` | a scalar counts with the part's weight |
| `nn._compute_moments_sync`, `BatchNormalization._moments` | synchronized statistics |
| `SeedGenerator.next` | ranks draw different random numbers from equal generator states |
| `random.normal`, `random.dropout` and others | draws without a batch axis are alike on all ranks |
| `gen_random_ops.random_uniform` and others | so does `tf.random`, in a shape of examples |
| `Variable._direct_assign` | to learn which statistics a step moved |
| `optimizer.apply` | gradients are reduced first of all, then hooked and clipped |
| `Function.__call__` | a `tf.function` that a step calls may have been traced without all that |
| `ReplicaContext.all_reduce` | for TensorFlow there is one replica, and nothing to sum |

The source of each replacement is the function of that name in Keras 3.15, or in TensorFlow for
`tf.GradientTape` and `Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import random as tf_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import SeedGenerator
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import clip_ops, gen_random_ops

from ktrainer.errors import ModelError
from ktrainer.runtime.autograph import rewritten_by_autograph
from ktrainer.runtime.monkeypatching import replaced_in
from ktrainer.steps.clipped_gradients import (
    clip_by_norm,
    clip_by_value,
    global_norm,
    inside_of_loop,
    norm_to_clip_by,
    warn_of_changes,
)
from ktrainer.steps.inner_functions import traced_with_the_step
from ktrainer.steps.loss_denominators import reduce_weighted_values
from ktrainer.steps.mean_metrics import update_mean
from ktrainer.steps.random_numbers import (
    draw_for_rows,
    draw_of_shape,
    keras_draw_for_rows,
    keras_draw_of_shape,
    keras_dropout,
    keras_shuffle,
    next_seed,
)
from ktrainer.steps.step_context import StepContext, tracing
from ktrainer.steps.step_helpers import warn_of_statistic, warn_of_weight
from ktrainer.steps.step_options import is_overwritten, through_hooks
from ktrainer.steps.unreduced_losses import aggregate_added, gradient_of_sums
from ktrainer.steps.update_guard import UpdateGuard, scales_loss

_OF_SHAPE = ("normal", "uniform", "randint", "truncated_normal", "gamma", "binomial", "beta")
_Update = Callable[[list[Any]], Any]  # of gradients


@contextmanager
def keras_patches(context: StepContext, optimizers: Sequence[Any] | None = ()) -> Iterator[None]:
    """Trace a Keras step, called inside, as one part of an update.

    Args:
        context: the part and its surroundings.
        optimizers: those that the step may apply; classes that override `apply` are covered. None:
            any that there are.
    """
    BatchNormalization = keras.layers.BatchNormalization
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (loss_module, "reduce_weighted_values", reduce_weighted_values),
        (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss", aggregate_added),
        (tf.GradientTape, "gradient", gradient_of_sums),
        (clip_ops, "global_norm", norm_to_clip_by),  # tf.clip_by_global_norm calls it
        (tf.linalg, "global_norm", global_norm),
        (tf, "clip_by_norm", clip_by_norm),
        (tf, "clip_by_value", clip_by_value),
        *((tf, name, inside_of_loop) for name in ("map_fn", "vectorized_map", "while_loop")),
        (reduction_metrics.Mean, "update_state", update_mean),
        (tf_nn, "_compute_moments_sync", _compute_moments_sync),
        (BatchNormalization, "_moments", _masked_moments),
        (SeedGenerator, "next", next_seed),
        *((tf_random, name, keras_draw_of_shape) for name in _OF_SHAPE),
        (tf_random, "categorical", keras_draw_for_rows),
        (tf_random, "shuffle", keras_shuffle),
        (tf_random, "dropout", keras_dropout),
        (gen_random_ops, "random_standard_normal", draw_of_shape),
        (gen_random_ops, "random_uniform", draw_of_shape),
        (gen_random_ops, "random_uniform_int", draw_of_shape),
        (gen_random_ops, "truncated_normal", draw_of_shape),
        (gen_random_ops, "random_gamma", draw_of_shape),
        (gen_random_ops, "random_poisson_v2", draw_of_shape),
        (gen_random_ops, "random_shuffle", draw_for_rows),
        (gen_random_ops, "multinomial", draw_for_rows),
        (tf_core.Variable, "_direct_assign", _direct_assign),
        (polymorphic_function.Function, "__call__", traced_with_the_step),
        (distribute_lib._DefaultReplicaContext, "all_reduce", _refuse_all_reduce),
    ]
    replaced += [(cls, "apply", _apply) for cls in _classes_that_apply(optimizers)]
    applying = _Applying(context)
    functions = [
        (owner, name, replacement(applying if name == "apply" else context, getattr(owner, name)))
        for owner, name, replacement in replaced
    ]
    with tracing(context), replaced_in(context, functions):
        yield


def _classes_that_apply(optimizers: Sequence[Any] | None) -> list[type]:
    if optimizers is None:
        every = list(_with_subclasses(BaseOptimizer))
    else:
        every = [cls for o in optimizers for cls in type(o).__mro__]
    classes = {cls: None for cls in every if "apply" in vars(cls)}
    classes[BaseOptimizer] = None
    classes[keras.optimizers.LossScaleOptimizer] = None
    return list(classes)


def _with_subclasses(cls: type) -> Iterator[type]:
    yield cls
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _compute_moments_sync(context: StepContext, original: Callable[..., Any]) -> Any:
    def compute_moments_sync(x: Any, axes: Any, keepdims: bool) -> Any:
        if context.collectives is None or context.record:
            return original(x, axes, keepdims)
        total = tf.reduce_sum(x, axis=axes, keepdims=True)
        squares = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
        count = tf.cast(tf.size(x), x.dtype) / tf.cast(tf.size(total), x.dtype)
        parts = [tf.reshape(total, [-1]), tf.reshape(squares, [-1]), tf.reshape(count, [1])]
        summed = context.sum(context.if_present(tf.concat(parts, 0)))
        features = tf.size(total)
        count = summed[-1]
        mean = tf.reshape(tf.math.divide_no_nan(summed[:features], count), tf.shape(total))
        second = tf.math.divide_no_nan(summed[features : 2 * features], count)
        second = tf.reshape(second, tf.shape(total))
        variance = tf.maximum(second - tf.square(mean), 0.0)
        mean, variance = (tf.ensure_shape(t, total.shape) for t in (mean, variance))
        if keepdims:
            return mean, variance
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return compute_moments_sync


def _masked_moments(context: StepContext, original: Callable[..., Any]) -> Any:
    """Keras ignores `synchronized` where there is a mask; a batch in slices must not."""

    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        if mask is None or not self.synchronized or context.collectives is None or context.record:
            return original(self, inputs, mask)
        axes, epsilon = self._reduction_axes, keras.config.epsilon()
        mask = ops.cast(ops.broadcast_to(mask[..., None], ops.shape(inputs)), "bool")
        total = ops.sum(ops.where(mask, inputs, 0), axes)
        count = ops.sum(ops.cast(mask, inputs.dtype), axes)
        total, count = tf.unstack(context.sum(context.if_present(tf.stack([total, count]))))
        mean = total / (count + epsilon)
        shape = [1] * inputs.shape.rank
        shape[self.axis] = -1
        squares = ops.square(ops.where(mask, inputs - ops.reshape(mean, shape), 0))
        variance = context.sum(context.if_present(ops.sum(squares, axes))) / (count + epsilon)
        return mean, variance

    return moments


def _direct_assign(context: StepContext, original: Callable[..., Any]) -> Any:
    def direct_assign(self: Any, value: Any) -> Any:
        context.assigned[id(self)] = self
        if context.on_assign is not None and not context.updating:
            context.on_assign(self, value)
        if not context.updating:
            (warn_of_weight if self.trainable else warn_of_statistic)(context, self, value)
        return original(self, value)

    return direct_assign


def _refuse_all_reduce(context: StepContext, original: Callable[..., Any]) -> Any:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if context.collectives is not None and not (context.updating or context.record):
            raise ModelError(
                "a step of `fit` calls `all_reduce` of TensorFlow's replica context, which knows "
                "of one replica: nothing would be summed over ranks. Gather the rows of all ranks "
                "with ktrainer.all_gather and reduce them, or use backend=tf_distribute"
            )
        return original(self, reduce_op, value, options)

    return all_reduce


class _Applying:
    """The outermost `apply` reduces; the one that updates weights hooks and clips."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.depth = 0
        self.hooked = False

    def reduced(
        self, optimizer: Any, gradients: list[Any], variables: list[Any], update: _Update
    ) -> Any:
        """Reduce gradients, and update weights once for all replicas, unless that is skipped."""
        context, guard = self.context, self.context.guard
        if context.collectives is not None or context.capture or guard is not None:
            context.refuse_compiled("it applies an optimizer")
        if context.collectives is not None or context.capture:
            _refuse_overwritten(variables)
        warn_of_changes(context, gradients)
        self.hooked = False
        context.applies += 1
        if context.capture:
            context.captured.append((optimizer, gradients, variables))
            return None
        scaled = context.powersgd is not None and scales_loss(optimizer)
        scale = optimizer.dynamic_scale.value if scaled else None
        gradients = context.reduce(gradients, variables, scale)
        skipped = tf.constant(False)
        if guard is not None:
            loss = context.loss_of_all
            assert loss is not None  # with a guard there is one
            bad = context.bad = guard.is_bad(loss, gradients, optimizer)
            skipped = guard.is_skipped(bad, loss, optimizer)
            gradients, update = [*gradients, bad, loss], _guarded(guard, optimizer, update)
        if context.remainder is not None:
            context.remainder.keep(~skipped)
            context.remainder = None
        merge = context.merge_replicas
        atomic = context.collectives is not None and context.collectives.atomic
        context.applying = True
        try:
            with context.order.ended() if atomic else nullcontext():
                return update(gradients) if merge is None else merge(optimizer, update, gradients)
        finally:
            context.applying = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside the block an optimizer assigns, or calls the optimizer inside it."""
        self.depth += 1
        self.context.updating = True
        try:
            yield
        finally:
            self.depth -= 1
            self.context.updating = self.depth > 0


def _refuse_overwritten(variables: Sequence[Any]) -> None:
    for variable in variables:
        if is_overwritten(variable):
            raise ModelError(
                f"{variable.path!r} is set from the largest values of a whole batch, as float8 "
                "layers do, which cannot be told from parts of it; use backend=local with "
                "trainer.accumulate=1, or another precision"
            )


def _guarded(guard: UpdateGuard, optimizer: Any, update: _Update) -> _Update:
    """An update of gradients, whether it is bad, and the loss; it is skipped if it is bad."""

    def unless_bad(values: list[Any]) -> None:
        *gradients, bad, loss = values
        guard.unless_bad(bad, loss, optimizer, lambda: update(gradients))

    return unless_bad


def _apply(applying: _Applying, original: Callable[..., Any]) -> Any:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        users = rewritten_by_autograph(original)

        def update(gradients: list[Any]) -> Any:
            # A LossScaleOptimizer hands unscaled gradients on to the optimizer inside it.
            if not applying.hooked and not isinstance(self, keras.optimizers.LossScaleOptimizer):
                applying.hooked = True
                gradients = through_hooks(self, applying.context.hooks, gradients, variables)
            with applying.updating():
                return users(self, gradients, trainable_variables)

        gradients = list(grads)
        if applying.depth:
            return update(gradients)
        return applying.reduced(self, gradients, variables, update)

    return apply
