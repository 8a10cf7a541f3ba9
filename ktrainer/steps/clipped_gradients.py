"""Norms of gradients, and clipping, in a step that has a part of them.

A step that clips what `tape.gradient` has returned would clip its own part of each gradient, before
the sum over ranks. So

| in the step | here |
|---|---|
| `tf.clip_by_global_norm`, `tf.linalg.global_norm`, `tf.clip_by_norm` | the norm is that of the sums; parts are only scaled by it |
| `tf.clip_by_value` | refused |
| any of them inside of a loop, a branch or a function with `jit_compile=True` | TensorFlow's own: it may act on gradients of single examples |
| a change that is not linear, or cannot be followed | a warning where an optimizer applies the gradients, unless the step runs eagerly |

Replacements for functions of TensorFlow; see `steps.keras_patches`.
"""  # noqa: E501

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.steps.embedding_gradients import mark_common
from ktrainer.steps.gradient_flow import LOCAL, reference
from ktrainer.steps.reduce_gradients import reduce_gradients
from ktrainer.steps.step_context import StepContext, present_graph, with_shape_of

IN_LOOP = "that of a loop"  # in place of the graph of a step
_INSTEAD = "Use the optimizer's {}, or trainer.clip, which act on the sum"


def note_gradients(context: StepContext, sources: Any, gradients: Any) -> None:
    """Remember which tensors are this part's gradients of weights."""
    for gradient, source in zip(tf.nest.flatten(gradients), tf.nest.flatten(sources), strict=True):
        if gradient is None or not isinstance(source, (tf.Variable, keras.Variable)):
            continue
        # Local variables are known as those of Keras.
        keras_variable = isinstance(source, keras.Variable)
        local = id(source) in context.local if keras_variable else bool(context.local)
        context.flow.note(gradient, local)
        if _is_outermost(context) and not local:
            context.part_gradients[id(source)] = (gradient, source)


def inside_of_loop(context: StepContext, original: Callable[..., Any]) -> Any:
    """Loops that TensorFlow may trace in the graph of the step, or run eagerly."""

    def loop(*args: Any, **named: Any) -> Any:
        graph, context.graph = context.graph, IN_LOOP
        try:
            return original(*args, **named)
        finally:
            context.graph = graph

    return loop


def global_norm(context: StepContext, original: Callable[..., Any]) -> Any:
    """The norm alone, which may only be logged: where it cannot be summed, it is the part's."""

    def norm(t_list: Any, *args: Any, **named: Any) -> Any:
        values = list(t_list)
        of_part = not context.compares and _is_part(context, values)
        reason = _why_not_summed(context, values) if of_part else ""
        if not reason:
            return norm_to_clip_by(context, original)(values, *args, **named)
        warnings.warn(
            f"tf.linalg.global_norm of gradients is that of a part: {reason}", stacklevel=3
        )
        return original(values, *args, **named)

    return norm


def norm_to_clip_by(context: StepContext, original: Callable[..., Any]) -> Any:
    """The norm in `tf.clip_by_global_norm`."""

    def norm(t_list: Any, *args: Any, **named: Any) -> Any:
        values = list(t_list)
        if _compares(context):
            return tf.ones([], next((v.dtype for v in values if v is not None), tf.float32))
        if not _is_part(context, values):
            return original(values, *args, **named)
        total = original(_summed(context, values), *args, **named)
        context.flow.end(total)
        return total

    return norm


def clip_by_norm(context: StepContext, original: Callable[..., Any]) -> Any:
    def clip(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
        if _compares(context):
            return t
        if not _is_part(context, [t]):
            return original(t, clip_norm, axes, name)
        slices = isinstance(t, tf.IndexedSlices)
        if slices and axes is not None:
            raise ModelError(
                "tf.clip_by_norm with `axes` is given the gradient of an embedding, whose slices "
                "are those of this rank. Make it dense by tf.convert_to_tensor"
            )
        (total,) = _summed(context, [t])
        values, sums = (each.values if slices else each for each in (t, total))
        limit: Any = clip_norm  # treated as in TensorFlow's own
        scalar = np.isscalar(limit)
        limit = max(limit, 0) if scalar else tf.cast(tf.maximum(limit, 0), values.dtype)
        norm = tf.sqrt(tf.reduce_sum(sums * sums, axes, keepdims=True))
        divisor = tf.maximum(norm, limit)
        context.flow.end(divisor)
        clipped = tf.ensure_shape(values * limit / divisor, values.shape)
        return tf.IndexedSlices(clipped, t.indices, t.dense_shape) if slices else clipped

    return clip


def clip_by_value(context: StepContext, original: Callable[..., Any]) -> Any:
    def clip(t: Any, *args: Any, **named: Any) -> Any:
        if not _is_part(context, [t]):
            return original(t, *args, **named)
        if context.compares:
            return t
        raise ModelError(
            "the step clips a gradient by value, before it is summed over ranks or parts of the "
            f"update: what is clipped then is not its sum. {_INSTEAD.format('clipvalue')}"
        )

    return clip


def warn_of_changes(context: StepContext, gradients: Sequence[Any]) -> None:
    """Warn of gradients that a step applies after it has changed them, other than linearly, or
    that it may have changed out of sight."""
    several = context.collectives is not None or context.capture
    if context.compares or not several or tf.executing_eagerly() or not context.flow:
        return
    flows = _changes(context, gradients)
    found = frozenset().union(*flows) - {LOCAL}
    if found:
        what = (
            f"changes gradients ({', '.join(sorted(found))}) before an optimizer applies them, "
            "which is where they are summed over ranks or parts of the update: each part is "
            "changed by itself, which is not what one process does. Scale them only, or change"
        )
    elif not flows and any(gradient is not None for gradient in gradients):
        what = (
            "applies gradients that cannot be followed to tape.gradient, such as those of a loop "
            "or a variable. Factors, sums and changes of single examples' gradients are right; "
            "other changes act on each part by itself, before parts are summed over ranks, which "
            "is not what one process does. Change"
        )
    else:
        return
    warnings.warn(
        f"the step {what} them after the sum: by trainer.clip, clipnorm, global_clipnorm or "
        "clipvalue of the optimizer, or on_gradients of a callback",
        stacklevel=2,
    )


def _compares(context: StepContext) -> bool:
    """Whether to leave norms of gradients out. The step runs eagerly then, so what is computed from
    its gradients cannot be told from the rest."""
    return context.compares and bool(context.flow)


def _is_outermost(context: StepContext) -> bool:
    """Whether what is computed now is in no loop, branch or compiled function of the step."""
    return context.graph is present_graph()


def _changes(context: StepContext, values: Sequence[Any]) -> list[frozenset[str]]:
    """The changes of those of `values` that are computed from this part's gradients."""
    return [c for c in map(context.flow.changes, values) if c is not None]


def _is_part(context: StepContext, values: Sequence[Any]) -> bool:
    """Whether some of `values` are this part's gradients, at most scaled or added, which have not
    been summed with those of others. Outputs of weights that a gradient has moved are not.

    Raises:
        ModelError: that is known of some of them only, as the step runs eagerly.
    """
    several = context.collectives is not None or context.capture
    if not several or context.applying or not _is_outermost(context):
        return False
    flows = _changes(context, values)
    if flows and tf.executing_eagerly() and len(flows) < sum(v is not None for v in values):
        raise ModelError(
            "the step runs eagerly, and takes a norm of gradients as tape.gradient returned them "
            "together with other tensors, which may be changed gradients. Take it of the former "
            "alone, or remove run_eagerly=True"
        )
    return bool(flows) and not frozenset().union(*flows) - {LOCAL}


def _why_not_summed(context: StepContext, values: Sequence[Any]) -> str:
    """The reason why gradients cannot be summed over ranks before they are applied, if any."""
    if context.capture or context.collectives is None:
        return (
            "others follow, since trainer.accumulate is above 1, or XLA compiles what each "
            "replica computes"
        )
    if any(LOCAL in each for each in _changes(context, values)):
        return "gradients of backend.local_layers are not summed over ranks"
    return ""


def _summed(context: StepContext, values: list[Any]) -> list[Any]:
    """`values`, of which those of this part are summed over ranks as gradients are. The first
    message has the last gradient of each weight, too."""
    reason, collectives = _why_not_summed(context, values), context.collectives
    if reason or collectives is None:
        raise ModelError(
            f"the step clips gradients by a norm, of which it has a part: {reason}. "
            + _INSTEAD.format("global_clipnorm or clipnorm")
        )
    sums = context.summed_gradients
    parts = {reference(v): v for v in values if context.flow.changes(v) is not None}
    if parts.keys() - sums:
        for gradient, source in context.part_gradients.values():
            parts[reference(gradient)] = with_shape_of(gradient, source)
        parts = {k: mark_common(v, context.rows) for k, v in parts.items() if k not in sums}
        weight = context.weight if context.gradient_weight is None else context.gradient_weight
        found, _ = reduce_gradients(collectives, list(parts.values()), [], weight, context.order)
        sums |= zip(parts, found, strict=True)
    return [sums.get(reference(v), v) for v in values]
