"""What cannot equal one process, or `Model.fit`, is said before the first update."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import pytest

from ktrainer import Trainer

NORMALISED = (
    "unlike one process: plain, nested/plain (BatchNormalization) uses the statistics of each "
    "local batch; synchronized=True uses the whole batch's"
)
DRAWN = "unlike one process: drops draws random numbers for each local batch"
ROUNDING = (
    "unlike one process: the gradient of attends/key/bias is rounding errors, which the optimizer "
    "scales up; outputs do not depend on it"
)
LENGTH = (
    "unlike Model.fit: Keras counts one optimizer iteration too many in each epoch of data of "
    "unknown length"
)


def _model(optimizer: str) -> Any:
    """Of each kind a layer that differs, and layers of the same classes that do not."""
    import keras
    from keras import layers

    plain = layers.BatchNormalization(name="plain")
    nested = keras.Sequential([keras.Input((4, 6)), plain], name="nested")
    frozen = layers.BatchNormalization(trainable=False)
    x = inputs = keras.Input((4, 6))
    for layer in (
        layers.BatchNormalization(name="plain"),
        nested,
        frozen,
        layers.BatchNormalization(synchronized=True),
        layers.Dropout(0.3, name="drops"),
        layers.Dropout(0.0),
        layers.GaussianNoise(0.0),
    ):
        x = layer(x)
    x = layers.MultiHeadAttention(2, 3, name="attends")(x, x)
    x = layers.LSTM(3)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(optimizer, "mse")
    return model


def _data(kind: str) -> Any:
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(16, 4, 6)).astype("float32")
    y = random.normal(size=(16, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    return data if kind == "known" else data.filter(lambda x, _: tf.reduce_all(x < 100))


def displayed(kind: str, optimizer: str, *words: str) -> list[str]:
    """The lines below the first one of what `fit` displays."""
    settings = ["logging.progress=plain", "logging.csv=false", "trainer.epochs=1", *words]
    with redirect_stdout(io.StringIO()) as text, Trainer(None, (), settings) as trainer:
        trainer.fit(_model(optimizer), _data(kind))
    return [each.strip() for each in text.getvalue().splitlines() if "unlike" in each]


def test_ranks(ranks: Callable[..., Any]) -> None:
    first, second = ranks(2).run(displayed, "known", "adam", "backend=data_parallel", deadline=120)
    assert (first, second) == ([NORMALISED, DRAWN, ROUNDING], [])


def test_ranks_without_an_optimizer_that_scales_rounding(ranks: Callable[..., Any]) -> None:
    first, _ = ranks(2).run(displayed, "unknown", "sgd", "backend=data_parallel", deadline=120)
    assert first == [NORMALISED, DRAWN, LENGTH]


@pytest.mark.parametrize(("kind", "expected"), [("known", []), ("unknown", [LENGTH])])
def test_one_process(ranks: Callable[..., Any], kind: str, expected: list[str]) -> None:
    assert ranks(1).run(displayed, kind, "adam") == [expected]
