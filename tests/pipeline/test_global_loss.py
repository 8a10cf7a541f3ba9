"""Losses of whole batches that a pipeline refuses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from ktrainer import Trainer
from ktrainer.errors import ModelError
from tests.pipeline.equal import configure, pipeline
from tests.pipeline.trained import BUILD, dense, with_loss

GLOBAL = "trainer.loss_scope=global"


def _fit(build: Any, x: Any, *words: str) -> None:
    """Train one stage in this process, with the loss of the whole batch."""
    configure("float64")
    words = pipeline(1, "backend.microbatches=2", GLOBAL, *words, "data.batch_size=8")
    with Trainer(overrides=[*words, "logging.progress=none", "logging.csv=false"]) as trainer:
        trainer.fit(build, (x, np.zeros((8, 1))))


def test_views_along_the_axis_of_examples_are_refused() -> None:
    """Microbatches of them cannot be put together in the order of one batch."""

    def build() -> keras.Model:
        a, b = keras.Input((6,)), keras.Input((6,))
        encoder = dense(4, 1)
        model = keras.Model([a, b], layers.Concatenate(0)([encoder(a), encoder(b)]))
        model.compile("sgd", lambda y, z: ops.mean(z))
        return model

    with pytest.raises(ModelError, match=r"shape \(8, 4\) for 4 examples.*along axis 1"):
        _fit(build, (np.ones((8, 6)), np.ones((8, 6))))


def test_a_loss_that_reads_weights_is_refused() -> None:
    reads = with_loss(lambda model, _, z: ops.mean(z) + ops.sum(model.layers[-1].kernel))

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        model = reads(inputs, dense(1, 1, name="last")(inputs))
        model.compile("sgd")
        return model

    with pytest.raises(ModelError, match=r"'last/kernel'.*read it in a layer's call"):
        _fit(build, np.ones((8, 6)))


def test_microbatches_are_not_gathered() -> None:
    with pytest.raises(ModelError, match=r"all_gather cannot.*trainer\.loss_scope=global"):
        _fit(BUILD["gathers"], np.ones((8, 6)), "trainer.loss_scope=local")
