"""Random numbers that do not depend on how a batch is split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.verify.batch_invariant_random import (
    RandomDraws,
    batch_invariant_random,
    frozen_batch_norm,
)

DRAWN: dict[str, Callable[[int], Any]] = {
    "keras normal": lambda n: keras.random.normal((n, 5)),
    "keras uniform": lambda n: keras.random.uniform((n, 2, 5), -1, 1),
    "keras randint": lambda n: keras.random.randint((n, 5), 3, 9),
    "keras truncated": lambda n: keras.random.truncated_normal((n, 5)),
    "keras dropout": lambda n: keras.random.dropout(tf.ones((n, 8)), 0.5),
    "keras categorical": lambda n: keras.random.categorical(tf.ones((n, 5)), 3),
    "keras gamma": lambda n: keras.random.gamma((n, 5), 2.0),
    "keras binomial": lambda n: keras.random.binomial((n, 5), 10, 0.3),
    "keras beta": lambda n: keras.random.beta((n, 5), 2.0, 3.0),
    "normal": lambda n: tf.random.normal([n, 5], 1.0, 2.0),
    "uniform": lambda n: tf.random.uniform([n, 5], 0, 7, tf.int32),
    "one each": lambda n: tf.random.uniform([n]),
    "stateless": lambda n: tf.random.stateless_normal([n, 5], seed=[1, 2]),
    "generator": lambda n: tf.random.Generator.from_seed(1).normal([n, 5]),
    "dropout": lambda n: tf.nn.dropout(tf.ones((n, 8)), 0.5),
}


@pytest.mark.parametrize("name", DRAWN)
def test_each_example_draws_the_same(name: str) -> None:
    draws = RandomDraws()
    with batch_invariant_random(draws):
        eight = np.array(DRAWN[name](8))
        draws.restart()
        two = np.array(DRAWN[name](2))
    for row in eight:
        np.testing.assert_array_equal(row, two[0])
    assert np.isfinite(eight).all()


def test_draws_differ_and_dropout_keeps_some() -> None:
    with batch_invariant_random(RandomDraws()):
        a, b = keras.random.normal((2, 50)), keras.random.normal((2, 50))
        kept = np.array(keras.random.dropout(tf.ones((2, 50)), 0.4))[0]
    assert not np.allclose(a, b)
    assert 0.3 < (kept > 0).mean() < 0.9
    np.testing.assert_allclose(kept[kept > 0], 1 / 0.6, rtol=1e-6)
    assert abs(float(np.mean(a))) < 0.3
    assert not np.allclose(keras.random.normal((2, 50))[0], keras.random.normal((2, 50))[1])


def test_the_batch_may_be_another_axis() -> None:
    draws = RandomDraws()
    with batch_invariant_random(draws):
        many = np.array(tf.random.normal([3, 8, 5]))
        draws.restart()
        few = np.array(tf.random.normal([3, 2, 5]))
    np.testing.assert_array_equal(many[:, :2], few)


def test_statistics_are_kept() -> None:
    layer = keras.layers.BatchNormalization()
    x = tf.random.normal([6, 4]) + 3.0
    layer.build(x.shape)
    with frozen_batch_norm():
        np.testing.assert_allclose(layer(x, training=True), x / np.sqrt(1.001), rtol=1e-5)
    assert not np.array(layer.moving_mean).any()
    layer(x, training=True)
    assert np.array(layer.moving_mean).any()
