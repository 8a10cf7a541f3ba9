"""Keras support for variables sharded over parameter servers.

A `ShardedVariable` is several variables that read as one tensor and are assigned as one. Two
places in Keras want a single one: the tape, which differentiates by variables, and the optimizer,
which updates each where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    gradient, update = tf.GradientTape.gradient, TFOptimizer._distributed_tf_update_step
    decay = TFOptimizer._apply_weight_decay

    def gradient_of(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        pieces = keras.tree.map_structure(_pieces, sources)
        if not any(isinstance(each, _Pieces) for each in keras.tree.flatten(pieces)):
            return gradient(self, target, sources, *args, **kwargs)
        flat = keras.tree.flatten(pieces)
        singles = [
            v for each in flat for v in (each.parts if isinstance(each, _Pieces) else [each])
        ]
        found = iter(gradient(self, target, singles, *args, **kwargs))
        joined = [
            each.joined([next(found) for _ in each.parts])
            if isinstance(each, _Pieces)
            else next(found)
            for each in flat
        ]
        return keras.tree.pack_sequence_as(sources, joined)

    def update_each(self: Any, distribution: Any, grads_and_vars: Any, rate: Any) -> None:
        for grad, variable in grads_and_vars:
            if isinstance(variable, ShardedVariableMixin):
                self.update_step(grad, variable, rate)
            else:
                update(self, distribution, [(grad, variable)], rate)

    def decay_each(self: Any, variables: Any) -> None:
        if self.weight_decay is None:
            return
        whole = []
        for variable in variables:
            inner = variable.value if isinstance(variable, keras.Variable) else variable
            if not isinstance(inner, ShardedVariableMixin):
                whole.append(variable)
            elif self._use_weight_decay(inner):
                rate = tf.cast(self.learning_rate * self.weight_decay, inner.dtype)
                inner.assign_sub(tf.convert_to_tensor(inner) * rate)
        decay(self, whole)

    def overwrite_each(self: Any, variables: Any) -> None:
        pairs = zip(variables, self._model_variables_moving_average, strict=False)
        for variable, mean in pairs:
            inner = variable.value if isinstance(variable, keras.Variable) else variable
            inner.assign(tf.convert_to_tensor(mean))

    with replaced(
        (tf.GradientTape, "gradient", gradient_of),
        (TFOptimizer, "_distributed_tf_update_step", update_each),
        (TFOptimizer, "_apply_weight_decay", decay_each),
        (TFOptimizer, "_overwrite_model_variables_with_average_value", overwrite_each),
    ):
        yield


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
    inner = source.value if isinstance(source, keras.Variable) else source
    return _Pieces(inner) if isinstance(inner, ShardedVariableMixin) else source
