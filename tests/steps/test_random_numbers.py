"""What steps draw by functions of `tf.random` for examples differs between ranks and replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tf_distribute.running import under
from tests.tf_distribute.test_features import trainer

ROWS = 2  # of each replica


def of_replicas(strategy: str, step: Callable[[Any], Any], data: Callable[[], Any]) -> list[Any]:
    """For each step, what it returns on each replica of this process, as lists."""
    with trainer(strategy, seed=3) as it:
        found = []
        for x in it.distribute(data()):
            results = it.run(step, x)
            if strategy == "mirrored":
                each = zip(*map(it.strategy.experimental_local_results, results), strict=True)
            else:
                each = [results]
            found.append([[draw.numpy().tolist() for draw in draws] for draws in each])
        return found


def drawn(strategy: str) -> Any:
    """What two steps draw on each replica of this process, for rows and for the batch."""
    import tensorflow as tf

    def step(x: Any) -> Any:
        rows = tf.shape(x)[0]
        noise = [tf.random.normal([rows, 3]), tf.random.uniform([rows, 3], seed=5)]
        noise.append(tf.random.gamma((), tf.ones([rows, 3])))
        # Of thousands of classes, so that no two draws are equal.
        chosen = tf.random.categorical(tf.zeros([rows, 10**6]), 3)
        mask = tf.nn.dropout(tf.ones([rows, 40]), 0.5)
        of_batch = [tf.random.uniform([3], seed=6), tf.random.normal([3, ROWS])[:, 0]]
        return tf.stack(noise), chosen, mask, tf.stack(of_batch)

    return of_replicas(strategy, step, lambda: tf.data.Dataset.range(4 * ROWS).batch(2 * ROWS))


@pytest.mark.quick("data_parallel")
@pytest.mark.parametrize("strategy", ["data_parallel", "mirrored"])
def test_each_draws_its_own_for_its_rows(ranks: Callable[..., Any], strategy: str) -> None:
    by_process = under(ranks, strategy, drawn, strategy)
    steps = zip(*by_process, strict=True)
    replicas = [replica for step in steps for process in step for replica in process]
    assert len(replicas) == 4  # two in each step
    noise, chosen, masks, of_batch = (np.array(draws) for draws in zip(*replicas, strict=True))
    assert len(np.unique(noise)) == noise.size == 4 * 3 * ROWS * 3
    assert len(np.unique(chosen)) == chosen.size
    assert len(np.unique(masks.reshape(4 * ROWS, -1), axis=0)) == 4 * ROWS
    if strategy == "data_parallel":
        assert np.array_equal(of_batch[::2], of_batch[1::2])
        assert len(np.unique(of_batch)) == of_batch.size / 2
    assert under(ranks, strategy, drawn, strategy) == by_process


def updates_at_random() -> int:
    """How many steps update, of those that decide it by a number."""
    import keras
    import tensorflow as tf

    with trainer("data_parallel", seed=3) as it:
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x) * weight
            gradient = tape.gradient(loss, weight.value)
            if tf.random.uniform(()) < 0.5:
                optimizer.apply([gradient], [weight])

        for x in it.distribute(tf.data.Dataset.from_tensors(np.ones(4, "float32")).repeat(8)):
            it.run(step, x)
        return int(optimizer.iterations)


def test_a_number_of_the_batch_decides_alike_on_all_ranks(ranks: Callable[..., Any]) -> None:
    (first, second) = ranks(2).run(updates_at_random, deadline=60)
    assert 0 < first == second < 8


def noise_of_layer() -> list[list[float]]:
    """What a layer draws in `fit` for this rank's rows."""
    import keras
    import tensorflow as tf

    from tests.dist.small import make_trainer

    class Noisy(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = tf.Variable(tf.zeros((ROWS, 3)), trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(tf.random.normal(tf.shape(x)))
            return x

    with make_trainer(seed=4) as it:
        noisy = Noisy()
        model = keras.Sequential([keras.Input((3,)), noisy, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        rows = 2 * ROWS
        it.fit(model, np.ones((rows, 3)), np.ones((rows, 1)), batch_size=rows)
        return noisy.seen.numpy().tolist()


def test_noise_of_a_layer_differs(ranks: Callable[..., Any]) -> None:
    noise = np.array(ranks(2).run(noise_of_layer))
    assert len(np.unique(noise)) == noise.size


def drawn_by_keras(strategy: str) -> list[tuple[Any, Any]]:
    """What two steps draw by functions of `keras.random` for rows, and for the batch."""
    import keras
    import tensorflow as tf
    from keras import random

    seeds, of_each = (keras.random.SeedGenerator(seed) for seed in (7, 8))

    def step(x: Any) -> Any:
        rows = tf.shape(x)[0]
        ones = tf.tile(x[None, :, None], [3, 1, 41])  # rows second, as in time-major data
        of_rows = [
            random.normal([rows, 3], seed=seeds),
            random.normal((3, rows), seed=seeds),
            random.beta(tf.shape(ones), 2.0, 3.0, seed=seeds),
            random.categorical(tf.zeros((1, 10**7)), rows, "float32", seed=seeds),
        ]
        masks = [random.dropout(ones, 0.5, shape, seeds) for shape in (None, (1, None, 41))]
        masks = tf.transpose(tf.concat(masks, 0), [1, 0, 2])
        of_batch = [
            random.uniform((), seed=seeds),
            *tf.unstack(random.truncated_normal((3,), seed=seeds)),
            *tf.unstack(random.gamma(tf.constant([2]), 2.0, seed=seeds)),
            *tf.unstack(tf.reshape(random.dropout(tf.ones((5, 7)), 0.5, seed=seeds), [-1])),
            *tf.unstack(random.shuffle(tf.range(9.0), seed=seeds)),
            *tf.unstack(random.dropout(tf.ones((5, 7)), 0.5, (7,), seeds)[0]),
            *tf.unstack(random.dropout(ones, 0.5, (1, 1, 41), seeds)[0, 0]),
        ]
        if strategy == "data_parallel":  # replicas cannot draw in a loop of TensorFlow
            of_rows.append(tf.map_fn(lambda _: random.uniform((), seed=of_each), x))
        of_rows = [tf.reshape(each, [-1]) for each in of_rows]
        return tf.concat(of_rows, 0), masks, tf.stack(of_batch)

    ones = np.ones(4 * ROWS, "float32")
    return of_replicas(strategy, step, lambda: tf.data.Dataset.from_tensors(ones).repeat(2))


@pytest.mark.parametrize("strategy", ["data_parallel", "mirrored"])
def test_keras_draws_alike_what_is_not_for_rows(ranks: Callable[..., Any], strategy: str) -> None:
    by_process = under(ranks, strategy, drawn_by_keras, strategy)
    (alone,) = ranks(1).run(drawn_by_keras, "data_parallel")
    steps = list(zip(*by_process, strict=True))
    for step, ((_, _, of_one),) in zip(steps, alone, strict=True):
        first, second = (replica for process in step for replica in process)
        assert not set(first[0]) & set(second[0])
        masks = np.concatenate([first[1], second[1]]).reshape(4 * ROWS, -1)
        assert len(np.unique(masks, axis=0)) == 4 * ROWS
        assert first[2] == second[2] == of_one
    assert steps[0][0][0][2] != steps[1][0][0][2]
