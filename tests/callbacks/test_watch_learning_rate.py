"""The learning rate in the rows of logs."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.callbacks.test_watch import Rows
from tests.small import build, data, trainer


def test_the_learning_rate_is_that_of_the_update() -> None:
    """Of an optimizer's own schedule, which gives that of the next update after it."""
    schedule, rows = keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0), Rows()
    words = {"watch__learning_rate": True, "logging__every": "1ba"}
    words["lr__schedule"] = "[{start: 4ba, multiplier: 0.5}]"
    with trainer([rows], **words) as it:
        it.fit(lambda: build(keras.optimizers.SGD(schedule)), data())
    rates = [row["learning_rate"] for row in rows.rows.values()]
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.3, 0.25])


class TwoOptimizers(keras.Model):
    """Never makes an update with the optimizer that Keras gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(3)
        self.optimizers = [keras.optimizers.SGD(0.2), keras.optimizers.SGD(0.3)]
        self.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def train_step(self, data: Any) -> Any:
        x, y = data
        for layer, optimizer in zip((self.first, self.second), self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_of_two_optimizers_the_first_that_updates() -> None:
    rows = Rows()
    words = {"watch__learning_rate": True, "watch__norms": "3ba"}
    with trainer([rows], **words) as it:
        it.fit(TwoOptimizers, data())
    assert [row["learning_rate"] for row in rows.rows.values()] == pytest.approx([0.2, 0.2])
