"""Inputs and layers that a pipeline takes as Keras does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer.errors import DataError
from tests.pipeline.test_input_lengths import same
from tests.pipeline.test_program import PIPELINE, make


def _of_one_feature(words: dict[str, Any], axes: tuple[int, ...]) -> list[Any]:
    """Trained and used on data with one axis, or with another one of length 1, in turn."""
    flat = np.random.default_rng(0).normal(size=16)
    results: list[Any] = []
    with make(words) as trainer:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), layers.Dense(3), layers.Dense(1)])
        model.compile("sgd", "mse")
        for count in axes:
            x = flat if count == 1 else flat[:, None]
            data = tf.data.Dataset.from_tensor_slices((x, flat)).batch(8)
            results += trainer.fit(model, data).history["loss"]
            results.append(trainer.evaluate(model, data)["loss"])
            results.append(trainer.predict(model, data.map(lambda x, _: x)))
        if words:
            with pytest.raises(DataError, match="as many dimensions as the first"):
                trainer.predict(model, flat[:, None, None, None])
    return results


@pytest.mark.parametrize("axes", [(1, 2, 1), (2, 1, 2)])
def test_a_last_axis_of_length_1_comes_and_goes(axes: tuple[int, ...]) -> None:
    """Keras, which compiles one step for both, takes either, but not both in turn."""
    same(_of_one_feature(PIPELINE, axes), _of_one_feature({}, (2, 2, 2)))


class _Places(layers.Layer):
    """Looks up tokens, and adds what belongs to each position, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = layers.Embedding(9, 4, mask_zero=True), layers.Embedding(5, 4)

    def call(self, tokens: Any) -> Any:
        return self.tokens(tokens) + self.places(keras.ops.arange(5))

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokens.compute_mask(*args, **kwargs)


class _Opaque(layers.Layer):
    """Calls TensorFlow, so its output's shape is known only by running it with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4)
        self.head = keras.Sequential([layers.Dense(4), layers.Dense(4)])

    def call(self, x: Any, mask: Any = None) -> Any:
        x = tf.identity(x)
        return self.head(x + self.attention(query=x, value=x, key=x, query_mask=mask))


def _built_with_positions(words: dict[str, Any]) -> list[Any]:
    """Trained after it was built, so that its weights leave the processes of other stages."""
    random = np.random.default_rng(0)
    tokens, labels = random.integers(0, 9, (16, 5)), random.integers(0, 3, (16, 5))
    keras.utils.set_random_seed(1)
    left, right = keras.Input((5,), dtype="int64"), keras.Input((5,), dtype="int64")
    decoded = _Opaque()(_Places()(right) + _Opaque()(_Places()(left)))
    model = keras.Model([left, right], layers.Dense(3)(decoded))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with make(words) as trainer:
        return trainer.fit(model, [tokens, tokens], labels).history["loss"]


@pytest.mark.exhaustive
def test_positions_of_a_model_whose_weights_leave(ranks: Callable[..., Any]) -> None:
    words = {"backend": {**PIPELINE["backend"], "partitions": 2, "costs": "uniform"}}
    expected = _built_with_positions({})
    for rank in ranks(2).run(_built_with_positions, words):
        same(rank, expected)


class _Block(layers.Dense):
    """Keras calls it `_block`, which TensorFlow allows inside of another scope only."""


def _of_a_private_class(words: dict[str, Any]) -> list[Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), _Block(3), _Block(2)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(16, 4))
    with make(words) as trainer:
        return trainer.fit(model, (x, x[:, :2])).history["loss"]


def test_names_of_layers_may_begin_with_an_underscore() -> None:
    same(_of_a_private_class(PIPELINE), _of_a_private_class({}))
