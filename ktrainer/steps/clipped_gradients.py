"""Norms of gradients, and clipping, in a step that has a part of them.

A step that clips what `tape.gradient` has returned would clip its own part of each gradient, before
the sum over ranks. So

| in the step | here |
|---|---|
| `tf.clip_by_global_norm`, `tf.linalg.global_norm`, `tf.clip_by_norm` | the norm is that of the sums; parts are only scaled by it |
| `tf.clip_by_value` | refused |
| another change that is not linear | a warning where an optimizer applies the gradients |

Replacements for functions of TensorFlow; see `steps.keras_patches`.
"""  # noqa: E501

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.steps.embedding_gradients import mark_common
from ktrainer.steps.reduce_gradients import reduce_gradients
from ktrainer.steps.step_context import StepContext

_INSTEAD = "Use the optimizer's {}, or trainer.clip, which act on the sum"
# Operations that are linear in each input, in one of them, and in the first one.
_LINEAR = {
    *("Add", "AddN", "AddV2", "Sub", "Neg", "Sum", "Mean", "UnsortedSegmentSum", "Cast"),
    *("Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape", "CheckNumericsV2"),
    *("CheckNumerics", "Reshape", "Squeeze", "ExpandDims", "Transpose", "ConcatV2", "Pack"),
    *("Unpack", "Split", "SplitV", "Slice", "StridedSlice", "GatherV2", "BroadcastTo"),
}
_PRODUCTS = {"Mul", "MulNoNan", "MatMul", "BatchMatMulV2", "Einsum"}
_QUOTIENTS = {"RealDiv", "DivNoNan"}
_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"}


def note_gradients(context: StepContext, sources: Any, gradients: Any) -> None:
    """Remember which tensors are this part's gradients of weights."""
    for gradient, source in zip(tf.nest.flatten(gradients), tf.nest.flatten(sources), strict=True):
        if gradient is not None and isinstance(source, (tf.Variable, keras.Variable)):
            context.part_gradients[_key(gradient)] = gradient


def global_norm(context: StepContext, original: Callable[..., Any]) -> Any:
    def norm(t_list: Any, *args: Any, **named: Any) -> Any:
        values = list(t_list)
        if _compares(context):
            return tf.ones([], next((v.dtype for v in values if v is not None), tf.float32))
        if not _is_part(context, values):
            return original(values, *args, **named)
        return _whole(context, original(_summed(context, values), *args, **named))

    return norm


def clip_by_norm(context: StepContext, original: Callable[..., Any]) -> Any:
    def clip(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
        if _compares(context):
            return t
        if not _is_part(context, [t]):
            return original(t, clip_norm, axes, name)
        (total,) = _summed(context, [t])
        squares = tf.reduce_sum(tf.square(_values(total)), axes, keepdims=True)
        scale = _whole(context, clip_norm / tf.maximum(tf.sqrt(squares), clip_norm))
        if isinstance(t, tf.IndexedSlices):
            return tf.IndexedSlices(t.values * scale, t.indices, t.dense_shape)
        return tf.ensure_shape(t * scale, t.shape)

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
    """Warn of gradients that a step applies after it has changed them, other than linearly."""
    if context.compares or (context.collectives is None and not context.capture):
        return
    found = _Dependence(context, gradients).nonlinear
    if found:
        warnings.warn(
            f"the step changes gradients ({', '.join(sorted(found))}) before an optimizer applies "
            "them, which is where they are summed over ranks or parts of the update: each part is "
            "changed by itself, which is not what one process does. Scale them only, or change "
            "them after the sum: by trainer.clip, clipnorm, global_clipnorm or clipvalue of the "
            "optimizer, or on_gradients of a callback",
            stacklevel=2,
        )


def _compares(context: StepContext) -> bool:
    """Whether to leave norms of gradients out. The step runs eagerly then, so what is computed from
    its gradients cannot be told from the rest."""
    return context.compares and bool(context.part_gradients)


def _is_part(context: StepContext, values: Sequence[Any]) -> bool:
    """Whether some of `values` are this part's gradients, at most scaled or added, which have not
    been summed with those of others. Outputs of weights that a gradient has moved are not."""
    several = context.collectives is not None or context.capture
    if not several or context.applying or not context.part_gradients:
        return False
    found = _Dependence(context, values)
    return any(found.of_part) and not found.nonlinear


def _summed(context: StepContext, values: list[Any]) -> list[Any]:
    """`values` summed over ranks as gradients are."""
    collectives = context.collectives
    if context.capture or collectives is None:
        raise ModelError(
            "the step takes the norm of gradients, of which it has a part: others follow, since "
            "trainer.accumulate is above 1, or XLA compiles what each replica computes. "
            + _INSTEAD.format("global_clipnorm or clipnorm")
        )
    if context.local:
        raise ModelError(
            "the step takes the norm of gradients, which backend.local_layers does not know which "
            f"to sum of. {_INSTEAD.format('global_clipnorm or clipnorm')}"
        )
    context.refuse_compiled("it takes the norm of gradients")
    weight = context.weight if context.gradient_weight is None else context.gradient_weight
    places = [i for i, of_part in enumerate(_Dependence(context, values).of_part) if of_part]
    parts = [mark_common(values[i], context.rows) for i in places]
    sums, _ = reduce_gradients(collectives, parts, [], weight, context.order)
    for i, total in zip(places, sums, strict=True):
        values[i] = total
    return values


def _whole(context: StepContext, tensor: tf.Tensor) -> tf.Tensor:
    """`tensor`, noted as the same in all parts."""
    context.of_all_parts[_key(tensor)] = tensor
    return tensor


class _Dependence:
    """How tensors depend on this part's gradients; in an eager step that is known of these alone.

    Attributes:
        of_part: whether each of them does.
        nonlinear: the types of the operations between, other than linear ones.
    """

    def __init__(self, context: StepContext, tensors: Iterable[Any]) -> None:
        self._context = context
        self._known: dict[Any, bool] = {}
        self._begun: set[Any] = set()  # a loop of TensorFlow 1 is a circle
        self.nonlinear: set[str] = set()
        self.of_part = [t is not None and self._is_of_part(_values(t)) for t in tensors]

    def _is_of_part(self, tensor: Any) -> bool:
        waiting = [tensor]
        while waiting:
            tensor = waiting[-1]
            unknown = [] if self._is_known(tensor) else self._unknown_inputs(tensor)
            waiting += unknown
            if not unknown:
                waiting.pop()
                if not self._is_known(tensor):
                    self._visit(tensor.op)
        return self._known[_key(tensor)]

    def _is_known(self, tensor: Any) -> bool:
        key = _key(tensor)
        if key not in self._known:
            if key in self._context.part_gradients:
                self._known[key] = True
            elif key in self._context.of_all_parts or not tf.is_symbolic_tensor(tensor):
                self._known[key] = False
        return key in self._known

    def _unknown_inputs(self, tensor: Any) -> list[Any]:
        if tensor.op.type in _SHAPES or _key(tensor) in self._begun:
            return []
        self._begun.add(_key(tensor))
        inputs = [x for x in tensor.op.inputs if not self._is_known(x)]
        return [x for x in inputs if _key(x) not in self._begun]

    def _visit(self, op: Any) -> None:
        """Conclude from an operation's inputs."""
        inputs = [] if op.type in _SHAPES else op.inputs
        parts = [self._known.get(_key(x), False) for x in inputs]
        linear = (
            op.type in _LINEAR
            or (op.type in _PRODUCTS and sum(parts) == 1)
            or (op.type in _QUOTIENTS and not parts[1])
            or (op.type in ("Select", "SelectV2") and not parts[0])
        )
        if any(parts) and not linear:
            self.nonlinear.add(op.type)
        self._known |= {_key(x): self._known.get(_key(x), any(parts)) for x in op.outputs}


def _key(gradient: Any) -> Any:
    tensor = _values(gradient)
    return (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
