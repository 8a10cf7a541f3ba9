"""A `train_step` that clips gradients itself clips those of the whole batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import ModelError
from tests.dist.cases import Case, Outcome, compare, difference, train
from tests.dist.harness import keras_state
from tests.tf_distribute.running import ONE_PROCESS, make_devices

WAYS = ["global_norm", "clip_by_norm", "added_and_scaled"]
MIRRORED = {"backend": "tf_distribute", "backend__strategy": "mirrored", "backend__devices": 2}


def changed(way: str, gradients: list[Any], more: list[Any]) -> list[Any]:
    import tensorflow as tf

    if way == "clip_by_norm":
        return [tf.clip_by_norm(gradient, 0.05) for gradient in gradients]
    if way == "clip_by_value":
        return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]
    if way == "of_sigmoids":  # no gradients
        dense = [tf.sigmoid(tf.convert_to_tensor(gradient)) for gradient in gradients]
        return [tf.clip_by_value(each, 0.1, 0.9) for each in dense]
    if way == "global_norm":
        norm = tf.linalg.global_norm(gradients)
        return tf.clip_by_global_norm(gradients, tf.minimum(norm, 0.1))[0]
    pairs = list(zip(gradients, more, strict=True))
    if way == "own":
        return [a / tf.norm(tf.convert_to_tensor(b)) for a, b in pairs]
    dense = [(tf.convert_to_tensor(a), tf.convert_to_tensor(b)) for a, b in pairs]
    return [0.5 * (a + b) / 3 for a, b in dense]


def case(way: str, **settings: Any) -> Case:
    """An embedding, whose gradients are slices, and a Dense layer; the last batch has 9 rows."""
    import keras
    import tensorflow as tf

    class Clips(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                twice = 2 * loss
            weights = self.trainable_variables
            gradients, more = (tape.gradient(each, weights) for each in (loss, twice))
            self.optimizer.apply(changed(way, gradients, more), weights)
            self._loss_tracker.update_state(loss)
            return {"loss": self._loss_tracker.result()}

    def build() -> Any:
        inputs = keras.Input((4,))
        embedded = keras.layers.Flatten()(keras.layers.Embedding(7, 3)(inputs))
        model = Clips(inputs, keras.layers.Dense(2)(embedded))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    random = np.random.default_rng(0)
    data = random.integers(0, 7, (25, 4)), random.normal(size=(25, 2)) * np.arange(25)[:, None]
    return Case(build, data, settings={"data.batch_size": 16, "trainer.epochs": 1, **settings})


def outcomes(ways: list[str], **settings: Any) -> list[Outcome]:
    if settings["backend"] == "tf_distribute":
        make_devices()
    found = []
    for way in ways:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*(changes gradients|one process|verify)")
            found.append(train(case(way), **settings))
        keras_state.clear()
    return found


def mirrored(ways: list[str]) -> list[Outcome]:
    return outcomes(ways, **MIRRORED)


@pytest.mark.quick("data_parallel")
@pytest.mark.parametrize("backend", ["data_parallel", "mirrored"])
def test_norms_are_those_of_the_sum(ranks: Callable[..., Any], backend: str) -> None:
    truth = outcomes(WAYS, backend="local")
    assert difference(truth[0], truth[2]) > 1e-3  # or clipping would do nothing
    if backend == "mirrored":
        every = ranks(1, ONE_PROCESS).run(mirrored, WAYS)
    else:
        every = ranks(2).run(outcomes, WAYS, backend=backend)
    compare(truth, every, WAYS)


def said(way: str, **settings: Any) -> str:
    """What is refused, or warned of, in a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(case(way), **settings)
        except ModelError as error:
            return str(error)
    return " ".join(str(w.message) for w in caught if "gradients" in str(w.message))


def messages() -> list[str]:
    found = [said(way, backend="data_parallel") for way in ("clip_by_value", "own", "of_sigmoids")]
    return [*found, said("global_norm", backend="data_parallel", trainer__accumulate=2)]


def test_what_cannot_be_told_from_a_part_is_said(ranks: Callable[..., Any]) -> None:
    for by_value, own, of_sigmoids, accumulated in ranks(2).run(messages):
        assert "clips a gradient by value" in by_value
        assert "changes gradients" in own
        assert "Sqrt" in own
        assert "changes gradients (Maximum, Minimum, Sigmoid)" in of_sigmoids
        assert "trainer.accumulate is above 1" in accumulated
