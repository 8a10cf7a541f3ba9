"""A model that cannot be traced: the error names the line, the reason and the way out."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from ktrainer.backends.pipeline.graph.trace import trace
from ktrainer.errors import ModelError


class _Branches(keras.Model):
    def call(self, x: Any) -> Any:
        if ops.sum(x) > 0:  # here
            return x
        return -x


class _Numpy(keras.Model):
    def call(self, x: Any) -> Any:
        return x + x.numpy().mean()  # here


class _Raw(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return tf.nn.relu(self.dense(x))  # here


class _Batch(keras.Model):
    def call(self, x: Any) -> Any:
        return ops.reshape(x, (ops.shape(x)[0], 2, 2))  # here


class _Loss(keras.Model):
    def call(self, x: Any) -> Any:
        self.add_loss(ops.sum(x))  # here
        return x + 1


class _WeightLoss(_Raw):
    def call(self, x: Any) -> Any:
        y = self.dense(x)
        self.add_loss(ops.sum(self.dense.kernel))  # here
        return y


class _Counts(_Raw):
    def __init__(self) -> None:
        super().__init__()
        self.count = self.make()

    def make(self) -> Any:
        return self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)  # here
        return self.dense(x)


class _CountsPlain(_Counts):
    def make(self) -> Any:
        return tf.Variable(0.0, trainable=False, name="count")

    def call(self, x: Any) -> Any:
        self.count.assign_add(1.0)  # here
        return self.dense(x)


class _Metric(_Counts):
    def make(self) -> Any:
        return keras.metrics.Mean(name="count")

    def call(self, x: Any) -> Any:
        self.count.update_state(1.0)  # here
        return self.dense(x)


@pytest.mark.parametrize(
    "kind, reason",
    [
        (_Branches, "control flow depends on the values"),
        (_Numpy, "reads the values of a tensor"),
        (_Raw, "calls a TensorFlow function"),
        (_Batch, "a dimension"),
        (_Loss, "adds a loss"),
        (_WeightLoss, "adds a loss"),
        (_Counts, "assigns the variable '__counts/count'"),
        (_CountsPlain, "assigns the tf.Variable 'count:0'"),
        (_Metric, "assigns the variable 'count/total'"),
    ],
)
def test_an_untraceable_model_names_the_line_the_reason_and_the_way_out(
    kind: type[keras.Model], reason: str
) -> None:
    lines, first = inspect.getsourcelines(kind)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(ModelError) as caught:
        trace(kind(), tf.TensorSpec((None, 4)))
    message = str(caught.value)
    assert f"{__file__}:{line}" in message
    assert reason in message
    assert "keras.layers.Layer" in message
    assert "ktrainer.partition(i)" in message


def test_a_layer_called_on_what_does_not_depend_on_the_inputs_may_add_no_loss() -> None:
    class Positions(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.positions = layers.Embedding(6, 1, activity_regularizer="l2", name="positions")

        def call(self, x: Any) -> Any:
            return x + ops.reshape(self.positions(ops.arange(6)), (1, 6))

    expected = "'positions', which adds a loss, is called on a tensor that does not depend on the"
    with pytest.raises(ModelError, match=expected):
        trace(Positions(), tf.TensorSpec((None, 6)))


class _CompiledLeaf(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    @tf.function
    def call(self, x: Any) -> Any:
        return x * self.scale


class _CompiledBlock(layers.Layer):
    def build(self, shape: Any) -> None:
        self.inner = layers.Dense(4)
        self.inner.build(shape)

    @tf.function
    def call(self, x: Any) -> Any:
        return self.inner(x)


class _CompiledSine(layers.Layer):
    @tf.function
    def call(self, x: Any) -> Any:
        return tf.sin(x)


class _CompiledModel(_Raw):
    @tf.function
    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("kind", [_CompiledLeaf, _CompiledBlock])
def test_a_layer_whose_call_is_a_tf_function_is_refused(kind: type[layers.Layer]) -> None:
    model = keras.Sequential([keras.Input((4,)), kind(name="compiled")])
    with pytest.raises(ModelError, match=r"'compiled' is a tf\.function.*Remove tf\.function"):
        trace(model)


def test_a_model_whose_call_is_a_tf_function_is_refused_and_a_layer_without_weights_is_not() -> (
    None
):
    with pytest.raises(ModelError, match=r"_CompiledModel .* is a tf\.function"):
        trace(_CompiledModel(), tf.TensorSpec((None, 4)))
    trace(keras.Sequential([keras.Input((4,)), _CompiledSine()]))


def test_random_numbers_outside_of_layers_are_refused() -> None:
    class Noisy(keras.Model):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal((4,))

    with pytest.raises(ModelError, match="random numbers drawn outside of any layer"):
        trace(Noisy(), tf.TensorSpec((None, 4)))
