"""Keras support for variables on parameter servers: those that are sharded, and sums of workers.

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
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import core as tf_core
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


@contextmanager
def adding_at_once() -> Iterator[None]:
    """Let `assign_add` of Keras variables, and `v.assign(v + x)`, add where the variable is.

    Keras reads, adds and assigns: of two replicas or workers that share a variable, one is lost.
    """

    def at_once(name: str) -> Callable[..., Any]:
        original = getattr(tf_core.Variable, name)

        def assign(self: Any, value: Any) -> Any:
            if global_state.get_global_attribute("stateless_scope") is not None:
                return original(self, value)
            if name != "assign":
                return getattr(self._value, name)(tf.cast(value, self._value.dtype))
            more = _added_to(self._value, value)
            return original(self, value) if more is None else self._value.assign_add(more)

        return assign

    names = ("assign", "assign_add", "assign_sub")
    with replaced(*((tf_core.Variable, name, at_once(name)) for name in names)):
        yield


def _added_to(variable: Any, value: Any) -> tf.Tensor | None:
    """The x of a traced `variable + x`; None of any other value."""
    is_sum = tf.is_symbolic_tensor(value) and value.op.type == "AddV2"
    if not is_sum or getattr(variable, "handle", None) is None:  # a sharded variable has several
        return None
    handle = value.graph.capture(variable.handle)
    for read, more in (value.op.inputs, reversed(value.op.inputs)):
        while read.op.type == "Identity":
            read = read.op.inputs[0]
        is_read = read.op.type == "ReadVariableOp" and read.op.inputs[0].name == handle.name
        if is_read and _is_written_after(read.op, handle):
            return None
        if is_read and more.dtype == variable.dtype and more.shape == variable.shape:
            return more
    return None


def _is_written_after(read: Any, handle: tf.Tensor) -> bool:
    """Whether the graph of a read may change the variable between it and the present moment."""
    operations = handle.graph.get_operations()
    later = operations[operations.index(read) + 1 :]
    return any(
        op.type != "ReadVariableOp" and any(each is handle for each in op.inputs) for op in later
    )
