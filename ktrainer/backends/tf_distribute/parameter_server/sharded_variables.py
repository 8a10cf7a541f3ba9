"""Keras support for variables sharded over parameter servers.

A `ShardedVariable` is several variables that read as one tensor and are assigned as one. Two
places in Keras want a single one: the tape, which differentiates by variables, and the optimizer,
which updates each where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow.python.distribute.sharded_variable import ShardedVariableMixin

from ktrainer.runtime.monkeypatching import replaced


@contextmanager
def sharded_variables() -> Iterator[None]:
    """Let Keras differentiate by, update and average sharded variables."""
    update, decay = TFOptimizer._distributed_tf_update_step, TFOptimizer._apply_weight_decay
    with replaced(
        (tf.GradientTape, "gradient", _gradient(tf.GradientTape.gradient)),
        (TFOptimizer, "_distributed_tf_update_step", _update_each(update)),
        (TFOptimizer, "_apply_weight_decay", _decay_each(decay)),
        (TFOptimizer, "_overwrite_model_variables_with_average_value", _overwrite_each),
    ):
        yield


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        pieces = keras.tree.map_structure(_pieces, sources)
        flat = keras.tree.flatten(pieces)
        if not any(isinstance(each, _Pieces) for each in flat):
            return original(self, target, sources, *args, **kwargs)
        singles = [
            v for each in flat for v in (each.parts if isinstance(each, _Pieces) else [each])
        ]
        found = iter(original(self, target, singles, *args, **kwargs))
        joined = [
            each.joined([next(found) for _ in each.parts])
            if isinstance(each, _Pieces)
            else next(found)
            for each in flat
        ]
        return keras.tree.pack_sequence_as(sources, joined)

    return gradient


def _update_each(original: Callable[..., Any]) -> Callable[..., None]:
    def update(self: Any, distribution: Any, grads_and_vars: Any, rate: Any) -> None:
        for grad, variable in grads_and_vars:
            if isinstance(variable, ShardedVariableMixin):
                self.update_step(grad, variable, rate)
            else:
                original(self, distribution, [(grad, variable)], rate)

    return update


def _decay_each(original: Callable[..., Any]) -> Callable[..., None]:
    def decay(self: Any, variables: Any) -> None:
        if self.weight_decay is None:
            return
        whole = []
        for variable in variables:
            inner = _value(variable)
            if not isinstance(inner, ShardedVariableMixin):
                whole.append(variable)
            elif self._use_weight_decay(inner):
                rate = tf.cast(self.learning_rate * self.weight_decay, inner.dtype)
                inner.assign_sub(tf.convert_to_tensor(inner) * rate)
        original(self, whole)

    return decay


def _overwrite_each(self: Any, variables: Any) -> None:
    for variable, mean in zip(variables, self._model_variables_moving_average, strict=False):
        _value(variable).assign(tf.convert_to_tensor(mean))


class _Pieces:
    """The pieces of one variable, in order along its first axis."""

    def __init__(self, variable: Any) -> None:
        self.parts = list(variable.variables)
        self.shape = variable.shape

    def joined(self, gradients: list[Any]) -> Any:
        """The gradient of the whole variable, from those of its pieces."""
        if all(each is None for each in gradients):
            return None
        slices = all(isinstance(each, tf.IndexedSlices) for each in gradients)
        if not slices:
            return tf.concat(
                [
                    tf.zeros(part.shape, part.dtype) if each is None else tf.convert_to_tensor(each)
                    for part, each in zip(self.parts, gradients, strict=True)
                ],
                0,
            )
        values, indices, first = [], [], 0
        for part, each in zip(self.parts, gradients, strict=True):
            values.append(each.values)
            indices.append(each.indices + tf.cast(first, each.indices.dtype))
            first += part.shape[0]
        shape = tf.constant(tuple(self.shape), tf.int64)
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), shape)


def _pieces(source: Any) -> Any:
    inner = _value(source)
    return _Pieces(inner) if isinstance(inner, ShardedVariableMixin) else source


def _value(variable: Any) -> Any:
    """TensorFlow's variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable
