"""What steps draw by functions of `tf.random` differs between ranks and replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tf_distribute.running import under
from tests.tf_distribute.test_features import trainer


def drawn(strategy: str) -> Any:
    """What two steps draw on each replica of this process: with and without seeds."""
    import tensorflow as tf

    with trainer(strategy, seed=3) as it:
        with it.scope():
            generator = tf.random.Generator.from_seed(1)

        def step() -> Any:
            noise = [tf.random.normal((3,)), tf.random.uniform((3,), seed=5)]
            noise.append(tf.nn.dropout(tf.ones(60), 0.5)[:3] + tf.random.normal((3,)))
            return tf.stack([*noise, generator.normal((3,))])

        found = [it.run(step) for _ in range(2)]
        if strategy == "mirrored":
            found = [it.strategy.experimental_local_results(each) for each in found]
        else:
            found = [[each] for each in found]
        return [[of_replica.numpy().tolist() for of_replica in each] for each in found]


@pytest.mark.quick("data_parallel")
@pytest.mark.parametrize("strategy", ["data_parallel", "mirrored"])
def test_each_draws_its_own(ranks: Callable[..., Any], strategy: str) -> None:
    by_process = under(ranks, strategy, drawn, strategy)
    steps = zip(*by_process, strict=True)
    replicas = np.array([[one for process in step for one in process] for step in steps])
    assert replicas.shape == (2, 2, 4, 3)  # steps, replicas, draws, numbers
    assert len(np.unique(replicas)) == replicas.size
    again = under(ranks, strategy, drawn, strategy)
    assert again == by_process


def eps(seed: int) -> tuple[list[float], list[float]]:
    """What a layer draws in `fit`, and what its weights begin with, on this rank."""
    import keras
    import tensorflow as tf

    from tests.dist.small import make_trainer

    class Noisy(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = tf.Variable(tf.zeros(3), trainable=False)
            self.kernel = tf.Variable(tf.random.normal((3,)))

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(tf.random.normal((3,)))
            return x

    with make_trainer(seed=seed) as it:
        noisy = Noisy()
        model = keras.Sequential([keras.Input((3,)), noisy, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        it.fit(model, np.ones((4, 3)), np.ones((4, 1)), batch_size=4)
        return noisy.seen.numpy().tolist(), noisy.kernel.numpy().tolist()


def test_noise_of_a_layer_differs_and_its_first_weights_do_not(ranks: Callable[..., Any]) -> None:
    (first, one), (second, other) = ranks(2).run(eps, 4)
    assert not set(first) & set(second)
    assert one == other
