"""What a traced stage says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

from ktrainer.backends.pipeline.stage.subgraphs import TracedGraph


@ops.custom_gradient
def _bend(x: Any) -> Any:
    return x * 1, lambda upstream: tf.clip_by_norm(upstream, 1.0)


def _in_a_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, _bend(x)), (0, x))[1]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_bend, True),
        (tf.function(_bend), True),
        (_in_a_loop, True),
        (lambda x: tf.py_function(lambda y: y * 2, [x], x.dtype), True),
        (tf.function(tf.tanh), False),
        (keras.layers.LayerNormalization(), False),
    ],
    ids=["custom", "called", "loop", "python", "plain", "layer"],
)
def test_custom_gradients_are_found(function: Callable[[Any], Any], expected: bool) -> None:
    graph = tf.compat.v1.wrap_function(function, [tf.TensorSpec([4, 6])]).graph
    assert TracedGraph(graph).has_custom_gradients == expected
