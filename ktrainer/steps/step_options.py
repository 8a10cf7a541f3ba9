"""Options of compiled steps: accumulation, XLA, clipping, gradient hooks, loss scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from ktrainer.runtime.autograph import rewritten_by_autograph
from ktrainer.steps.update_guard import UpdateGuard

GradientHook = Callable[[list[Any], list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Clip:
    """Gradient clipping, at most one kind, applied to gradients already summed over ranks.

    Attributes:
        global_norm: scale all gradients so that their joint L2 norm is at most this.
        norm: scale each gradient so that its L2 norm is at most this.
        value: cut each element to [-value, value].
    """

    global_norm: float | None = None
    norm: float | None = None
    value: float | None = None

    def __bool__(self) -> bool:
        return any(v is not None for v in (self.global_norm, self.norm, self.value))

    def __call__(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        if self.global_norm is not None:
            return list(tf.clip_by_global_norm(gradients, self.global_norm)[0])
        if self.norm is not None:
            return [None if g is None else tf.clip_by_norm(g, self.norm) for g in gradients]
        if self.value is not None:
            return [
                None if g is None else tf.clip_by_value(g, -self.value, self.value)
                for g in gradients
            ]
        return gradients


@dataclass(frozen=True)
class StepOptions:
    """How steps run.

    Attributes:
        accumulate: local batches an update may consist of.
        xla: compile the computation, never the communication, with XLA.
        clip: gradient clipping, after the reduction.
        average: average over examples; False sums over ranks, which is `size` times as much.
        hooks: functions of (gradients, variables) run between reduction and clipping.
        guard: skips updates that would spoil the model; None: none is skipped.
        loss_scope: what a loss is computed on: "local", the examples of each local batch, or
            "global", those of the whole batch, gathered first.
    """

    accumulate: int = 1
    xla: bool = False
    clip: Clip = Clip()
    average: bool = True
    hooks: tuple[GradientHook, ...] = ()
    guard: UpdateGuard | None = None
    loss_scope: Literal["local", "global"] = "local"

    def all_hooks(self) -> tuple[GradientHook, ...]:
        """The hooks, then the clipping."""
        return (*self.hooks, self.clip) if self.clip else self.hooks


def through_hooks(
    optimizer: Any, hooks: Sequence[GradientHook], gradients: list[Any], variables: list[Any]
) -> list[Any]:
    """Gradients as hooks and clipping leave them; they get those of the loss without the
    optimizer's `loss_scale_factor`, by which the optimizer divides them afterwards."""
    if not hooks:
        return gradients
    scale = optimizer.loss_scale_factor
    places = [i for i, v in enumerate(variables) if not is_overwritten(v)]
    found, of = ([values[i] for i in places] for values in (gradients, variables))
    if scale is not None:
        found = [_times(gradient, 1 / scale) for gradient in found]
    for hook in hooks:
        found = list(rewritten_by_autograph(hook)(found, of))
    if not found:
        return []  # a hook has made the update itself
    changed = list(gradients)
    for i, gradient in zip(places, found, strict=True):
        changed[i] = gradient if scale is None else _times(gradient, scale)
    return changed


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's "gradient" is its new value: Keras' float8 layers keep scales
    so."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient * factor
