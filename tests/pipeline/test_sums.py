"""Sums of gradients, and the memory that they are in."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.sums import GradientSums


def test_what_is_written_to_the_memory_of_a_sum_is_in_the_sum() -> None:
    sums, variable = GradientSums(), keras.Variable(np.zeros((2, 3)), dtype="float32")
    sums.put(variable, np.ones((2, 3), np.float32))
    sums.of(variable).assign_add(np.ones((2, 3), np.float32))
    (array,) = sums.memory([variable]) or []
    np.testing.assert_array_equal(array, 2.0)
    array *= 3
    np.testing.assert_array_equal(sums.take(variable), np.full((2, 3), 6.0))


def test_equal_gradients_are_not_summed_in_the_same_memory() -> None:
    """TensorFlow computes them once, and both variables are assigned that one tensor."""
    sums = GradientSums()
    variables = [keras.Variable(np.zeros(100), dtype="float32") for _ in range(2)]

    @tf.function(autograph=False)
    def add_up(gradient: tf.Tensor) -> None:
        for variable in variables:
            sums.of(variable).assign(gradient * 2.0)

    add_up(tf.ones(100))
    first, second = sums.memory(variables) or []
    first += 5
    np.testing.assert_array_equal(second, 2.0)
    np.testing.assert_array_equal(sums.take(variables[1]), np.full(100, 2.0))
    np.testing.assert_array_equal(sums.take(variables[0]), np.full(100, 7.0))
