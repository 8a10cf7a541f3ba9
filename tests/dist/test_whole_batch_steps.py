"""A `train_step` that indexes the first axis of its batches is told so where they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.errors import DataError
from tests.tf_distribute.running import ONE_PROCESS, make_devices


class Pairs(keras.utils.PyDataset):
    """Batches `(anchors, positives)` in one array."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).normal(size=(2, 5, 4)).astype("float32")


class Metric(keras.Model):
    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(anchors) - self(positives)) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def said(backend: dict[str, Any], **data: Any) -> str:
    inputs = keras.Input((4,))
    model = Metric(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd")
    quiet = {"logging": {"progress": "none", "csv": False}, "checkpoint": {"resume": "never"}}
    with Trainer({**quiet, "backend": backend, "data": data}) as trainer:
        try:
            trainer.fit(model, Pairs())
        except DataError as error:
            return str(error) if error.__cause__ is not None else f"without a cause: {error}"
        return "trained"


def on_ranks() -> list[str]:
    backend = {"name": "data_parallel"}
    return [said(backend), said(backend, batch="per_worker")]


def mirrored() -> list[str]:
    make_devices()
    many = {"name": "tf_distribute", "strategy": "mirrored"}
    return [said({**many, "devices": count}) for count in (2, 1)]


REASON = "slice index 1 of dimension 0 out of bounds. If the first axis"


@pytest.mark.quick("ranks")
@pytest.mark.parametrize(
    ("function", "ranks_and_mode", "remedy"),
    [
        (on_ranks, (2,), "data.batch=per_worker, or train with backend=local"),
        (mirrored, (1, ONE_PROCESS), "backend.devices=1"),
    ],
    ids=["ranks", "mirrored"],
)
def test_a_step_that_needs_all_of_a_batch(
    ranks: Callable[..., Any], function: Any, ranks_and_mode: tuple[Any, ...], remedy: str
) -> None:
    for message, whole in ranks(*ranks_and_mode).run(function, deadline=200):
        assert "1 of its 2 rows" in message
        assert REASON in message
        assert remedy in message
        assert "\n" not in message
        assert whole == "trained"
