"""Which Keras losses are divided by a number of values that is counted over all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext


def loss(x: tf.Tensor) -> tf.Tensor:
    return keras.losses.MeanSquaredError()(x, tf.zeros_like(x))


def chosen(x: tf.Tensor) -> tf.Tensor:
    return loss(tf.boolean_mask(x, x[:, 0] > 0))


def chosen_in_loop(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda row: loss(tf.boolean_mask(row, row > 0)), x))


def scattered(x: tf.Tensor) -> tf.Tensor:
    places = tf.where(x[:, 0] > 0)
    return loss(tf.tensor_scatter_nd_update(x, places, tf.gather_nd(x, places)))


def of_bags(x: tf.Tensor) -> tf.Tensor:
    ids = tf.sparse.from_dense(tf.cast(x > 0, tf.int64))
    return loss(tf.nn.embedding_lookup_sparse(tf.ones((4, 3)), ids, None, combiner="mean"))


def counted(function: Callable[..., Any], x: Any, traced: bool) -> tuple[int, bool]:
    """How many losses are counted, and whether one has not as many values as there are rows."""
    context = StepContext(
        tf.ones([], tf.float64),
        denominators=[],
        record=True,
        capture=True,
        rows=None if traced else len(x),
    )
    with keras_patches(context):
        if traced:
            tf.function(function, autograph=False).get_concrete_function(x)
        else:
            function(tf.constant(x))
    return len(context.denominators or []), context.uneven


@pytest.mark.parametrize(
    ("function", "times"),
    [(loss, 0), (chosen, 1), (chosen_in_loop, 0), (scattered, 0), (of_bags, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_losses_of_rows_that_data_choose_are_counted(
    function: Callable[..., Any], times: int
) -> None:
    spec = tf.TensorSpec((None, 3), tf.float32)
    assert counted(function, spec, traced=True) == (times, False)


@pytest.mark.parametrize("signs", [[1, -1], [-1, -1], [-1]], ids=str)
def test_eager_ones_are_not_and_are_noted(signs: list[int]) -> None:
    x = np.array(signs, "float32")[:, None] * np.ones((1, 3), "float32")
    assert counted(chosen, x, traced=False) == (0, True)
    assert counted(loss, x, traced=False) == (0, False)
