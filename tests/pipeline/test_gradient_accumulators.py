"""Sums of gradients, and the memory that they are in."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.backends.pipeline.runtime.tied_gradients import TiedGradients
from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.distributed import SingleWorld


def test_what_is_written_to_the_memory_of_a_sum_is_in_the_sum() -> None:
    sums, variable = GradientAccumulators(), keras.Variable(np.zeros((2, 3)), dtype="float32")
    sums.put(variable, np.ones((2, 3), np.float32))
    sums.of(variable).assign_add(np.ones((2, 3), np.float32))
    (array,) = sums.memory([variable]) or []
    np.testing.assert_array_equal(array, 2.0)
    array *= 3
    np.testing.assert_array_equal(sums.take(variable), np.full((2, 3), 6.0))


def test_variables_that_the_same_partitions_hold_are_summed_together() -> None:
    variables = [keras.Variable(np.zeros(2), name=name) for name in "abcd"]
    of = [[0, 1], [0, 2], [0, 1], [1, 2]]
    holders = {id(v): partitions for v, partitions in zip(variables, of, strict=True)}
    here = Transport(SingleWorld(), 3)
    groups = TiedGradients(variables, holders, GradientAccumulators(), here).by_holders()
    assert [[v.name for v in group] for group in groups] == [["a", "c"], ["b"]]


@pytest.mark.parametrize("together", [True, False])
def test_equal_gradients_are_not_summed_in_the_same_memory(together: bool) -> None:
    """TensorFlow computes them once, and both variables are assigned that one tensor."""
    sums = GradientAccumulators()
    variables = [keras.Variable(np.zeros(100), dtype="float32") for _ in range(2)]
    assert sums.fill(variables)

    @tf.function(autograph=False)
    def add_up(gradient: tf.Tensor) -> None:
        for variable in variables:
            sums.of(variable).assign(gradient * 2.0)

    add_up(tf.ones(100))
    asked, others = (variables, []) if together else (variables[:1], variables[1:])
    first, *_ = sums.memory(asked, others) or []
    first += 5
    np.testing.assert_array_equal(sums.take(variables[1]), np.full(100, 2.0))
    np.testing.assert_array_equal(sums.take(variables[0]), np.full(100, 7.0))
