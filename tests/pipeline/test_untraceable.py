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


def test_random_numbers_outside_of_layers_are_refused() -> None:
    class Noisy(keras.Model):
        def call(self, x: Any) -> Any:
            return x + keras.random.normal((4,))

    with pytest.raises(ModelError, match="random numbers drawn outside of any layer"):
        trace(Noisy(), tf.TensorSpec((None, 4)))
