"""Which lookups are found to be of the same rows in every part of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from ktrainer.steps.embedding_gradients import CommonSlices, mark_common

TABLE = np.float64(np.arange(24).reshape(8, 3))


def is_common(
    indices: Callable[[Any], Any],
    shape: tuple[int | None, ...] = (None, 4),
    rows: int | None = None,
) -> bool:
    """Whether the gradient of a lookup, in a step traced for batches of this shape, is."""
    table = keras.Variable(TABLE, dtype="float64")
    found = []

    @tf.function(input_signature=[tf.TensorSpec(shape, tf.int32)], autograph=False)
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = ops.sum(ops.take(table, indices(batch), axis=0))
        gradient = tape.gradient(loss, table.value)
        found.append(mark_common(gradient, rows))
        return loss

    step.get_concrete_function()
    assert isinstance(found[0], tf.IndexedSlices)
    return isinstance(found[0], CommonSlices)


PLACES = np.array([0, 3, 1])


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: ops.arange(4),
        lambda x: ops.arange(ops.shape(x)[1]),
        lambda x: tf.range(tf.shape(x)[1]),
        lambda x: tf.range(tf.shape(x)[-1]),
        lambda x: tf.constant([0, 1, 2]),
        lambda x: ops.arange(3)[None, :] + 0,
    ],
    ids=["arange", "length", "tf.shape", "last axis", "constant", "two axes"],
)
def test_indices_of_the_same_rows(indices: Callable[[Any], Any]) -> None:
    assert is_common(indices)


@pytest.mark.parametrize(
    "indices",
    [
        lambda x: x,
        lambda x: x[0],
        lambda x: ops.arange(4) + ops.max(x),
        lambda x: tf.zeros([4], tf.int32) * tf.shape(x)[0],
        lambda x: tf.range(tf.shape(x)[0]),
        lambda x: ops.broadcast_to(ops.arange(4), ops.shape(x)),
        lambda x: tf.random.uniform([4], maxval=8, dtype=tf.int32),
        lambda x: tf.random.stateless_uniform([4], [1, 2], maxval=8, dtype=tf.int32),
        lambda x: tf.numpy_function(lambda: PLACES, [], tf.int64),
        lambda x: tf.constant(PLACES),
        lambda x: tf.constant([0]),
        lambda x: ops.abs(ops.arange(3)[:, None] - ops.arange(3)[None, :]),
    ],
    ids=[
        *("tokens", "one row", "sum", "rows", "one a row", "broadcast"),
        *("random", "with a seed", "Python"),
        *("constants of this rank, perhaps", "its number", "distances"),
    ],
)
def test_indices_that_may_differ_between_parts(indices: Callable[[Any], Any]) -> None:
    assert not is_common(indices)


def test_lengths_that_are_not_known() -> None:
    assert not is_common(lambda x: tf.range(tf.shape(x)[1]), (None, None))


def test_rows_whose_number_is_static() -> None:
    """What is computed from it looks like a constant."""
    lookup = lambda x: ops.arange(ops.shape(x)[0])  # noqa: E731
    assert not is_common(lookup, (5, 4), rows=5)
    assert is_common(lookup, (5, 4))  # so it must be told


def test_indices_in_a_variable() -> None:
    """Each part of an update may read another value, and each rank has its own."""
    places = tf.Variable([0, 1, 2])
    assert not is_common(lambda x: tf.identity(places))
    assert not is_common(lambda x: (places[:1].assign([2]), tf.identity(places))[1])


@pytest.mark.parametrize("of_batch", [False, True])
def test_a_loop_inside_of_the_step(of_batch: bool) -> None:
    """Its body is a graph of its own, which takes what it needs from the one around it."""
    table, found = keras.Variable(TABLE, dtype="float64"), []

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.int32)], autograph=False)
    def step(batch: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            places = batch[0] if of_batch else ops.arange(4)
            with tf.GradientTape() as tape:
                loss = ops.sum(ops.take(table, places, axis=0))
            found.append(mark_common(tape.gradient(loss, table.value), None))
            return i + 1, total + loss

        return tf.while_loop(lambda i, _: i < 2, body, (0, tf.constant(0.0, tf.float64)))

    step.get_concrete_function()
    assert isinstance(found[0], CommonSlices) is not of_batch
