"""Unreduced losses, which Keras or the gradient tape sums over examples.

Replacements for functions of Keras and TensorFlow; see `steps.keras_patches`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ktrainer.steps.clipped_gradients import note_gradients
from ktrainer.steps.gradient_flow import reference
from ktrainer.steps.step_context import StepContext

_DIFFERENTIATING = ("tensorflow.python.eager.backprop", "tensorflow.python.ops.custom_gradient")


def aggregate_added(context: StepContext, original: Callable[..., Any]) -> Any:
    """Keras sums what is given to `add_loss`."""

    def aggregate_additional_loss(self: Any, loss: Any) -> Any:
        total = original(self, loss)
        if not context.is_over_examples(tf.convert_to_tensor(loss)):
            return total
        return tf.math.multiply_no_nan(total, tf.cast(_scale(context, loss), total.dtype))

    return aggregate_additional_loss


def gradient_of_sums(context: StepContext, original: Callable[..., Any]) -> Any:
    """A tape differentiates the sum of its targets' elements."""

    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        # An inner gradient, with respect to inputs, is no gradient of the update's loss; nor is
        # what TensorFlow differentiates itself, as a layer that is recomputed does.
        of_loss = _is_of_weights(sources) and not _called_by_tensorflow()
        targets, scaled = tf.nest.flatten(target), output_gradients
        if of_loss:
            scaled = _scaled(context, targets, output_gradients)
        found = original(self, target, sources, scaled, unconnected_gradients)
        if of_loss:
            note_gradients(context, sources, found)
        if of_loss or not _unscaled(context, targets, output_gradients):
            for each in filter(tf.is_tensor, tf.nest.flatten(found)):
                context.upstream.note(each, local=False)
            context.differentiated_by |= {reference(s) for s in tf.nest.flatten(sources)}
        return found

    return gradient


def _scaled(context: StepContext, targets: list[Any], given: Any) -> Any:
    """The upstream gradient of each target: that of a sum over examples, as a mean."""
    places = _unscaled(context, targets, given)
    if not places:
        return given
    # All have one then: TensorFlow takes None for all of them, or for none.
    upstream = [tf.ones_like(t) for t in targets] if given is None else tf.nest.flatten(given)
    for i, target in enumerate(targets):
        if i in places:
            scale = tf.cast(_scale(context, target), target.dtype)
            upstream[i] = tf.math.multiply_no_nan(tf.convert_to_tensor(upstream[i]), scale)
    return upstream


def _unscaled(context: StepContext, targets: list[Any], given: Any) -> set[int]:
    """The places of targets whose upstream gradient is that of a sum over examples."""
    over = {i for i, t in enumerate(targets) if tf.is_tensor(t) and context.is_over_examples(t)}
    if given is None or not over:
        return over
    upstream = tf.nest.flatten(given)
    return {i for i in over if not _is_scaled_already(context, targets[i], upstream[i])}


def _is_scaled_already(context: StepContext, target: tf.Tensor, upstream: Any) -> bool:
    """Return whether a tape has computed an upstream gradient, and so scaled it. Of an eager step
    these are tensors as a tape has returned them, and targets that one has differentiated by."""
    known = reference(target) in context.differentiated_by
    return known or context.upstream.changes(upstream) is not None


def _scale(context: StepContext, tensor: Any) -> tf.Tensor:
    """`scale_of_sum`, and 1 for a scalar, which may be told only when the step runs."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank is not None:
        return context.scale_of_sum(tensor)
    is_scalar = tf.equal(tf.rank(tensor), 0)
    rows = tf.cond(is_scalar, lambda: tf.ones([], tf.int32), lambda: tf.shape(tensor)[0])
    return tf.where(is_scalar, tf.ones([], tf.float64), context.scale_of_sum(tf.zeros([rows])))


def _is_of_weights(sources: Any) -> bool:
    return any(isinstance(s, (tf.Variable, keras.Variable)) for s in tf.nest.flatten(sources))


def _called_by_tensorflow() -> bool:
    """Whether the caller is TensorFlow's own code, not a user's function that it converted; or a
    user's gradient function, which TensorFlow calls as it differentiates."""
    frame: Any = sys._getframe(2)
    while _name(frame).startswith(("ktrainer.", "tensorflow.python.autograph.")):
        frame = frame.f_back
    if _name(frame).startswith("tensorflow."):
        return True
    while frame is not None and _name(frame) not in _DIFFERENTIATING:
        frame = frame.f_back
    return frame is not None


def _name(frame: Any) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
