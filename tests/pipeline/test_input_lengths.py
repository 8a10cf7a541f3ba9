"""Models that must know how long their inputs are, on inputs of several lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.pipeline.test_program import PIPELINE, make


class Positions(keras.Model):
    """Adds to each token what belongs to its position, and so must know how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = layers.Embedding(9, 4), layers.Embedding(20, 4)
        self.head = layers.Dense(3)

    def call(self, tokens: Any) -> Any:
        places = self.places(keras.ops.arange(keras.ops.shape(tokens)[1]))
        return self.head(keras.ops.mean(self.tokens(tokens) + places, axis=1))


def _with_positions() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Positions()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _of_many_lengths(words: dict[str, Any], lengths: tuple[int, ...]) -> list[Any]:
    """Trained on one length, twice, then used on others, and trained on one of those."""
    random = np.random.default_rng(0)
    tokens = {length: random.integers(0, 9, (16, length)) for length in lengths}
    labels = random.integers(0, 3, 16)
    with make(words) as trainer:
        model = trainer.backend.build_model(_with_positions)
        trainer.fit(model, (tokens[10], labels))
        trainer.fit(model, (tokens[10], labels))
        found = [trainer.evaluate(model, (x, labels))["loss"] for x in tokens.values()]
        found += [trainer.predict(model, x) for x in tokens.values()]
        trainer.fit(model, (tokens[7], labels))
        return [*found, trainer.predict(model, tokens[10])]


def same(ours: list[Any], expected: list[Any]) -> None:
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_lengths_that_the_model_must_know() -> None:
    lengths = (10, 7, 1)
    same(_of_many_lengths(PIPELINE, lengths), _of_many_lengths({}, lengths))


@pytest.mark.exhaustive
def test_lengths_that_a_stage_must_know_without_the_weights(ranks: Callable[..., Any]) -> None:
    """The second stage does not hold what the model looks up by position."""
    lengths = (10, 7)
    words = {"backend": {**PIPELINE["backend"], "partitions": 2, "costs": "uniform"}}
    expected = _of_many_lengths({}, lengths)
    for rank in ranks(2).run(_of_many_lengths, words, lengths):
        same(rank, expected)


def _of_open_lengths(words: dict[str, Any]) -> list[Any]:
    """Trained on batches of two lengths, neither of which is known before they come."""
    random = np.random.default_rng(0)
    batches = [random.integers(0, 9, (8, length)) for length in (10, 7, 10)]
    labels = random.integers(0, 3, 8)
    spec = (tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None,), tf.int64))
    given = tf.data.Dataset.from_generator(
        lambda: ((x, labels) for x in batches), output_signature=spec
    )
    with make(words) as trainer:
        history = trainer.fit(_with_positions, given).history
        return [*history["loss"], *(trainer.predict(trainer.model, x) for x in batches)]


def test_lengths_that_no_spec_says() -> None:
    same(_of_open_lengths(PIPELINE), _of_open_lengths({}))
