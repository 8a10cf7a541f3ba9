"""Losses of whole batches, as one process computes them: sums over examples, and with
`trainer.loss_scope=global` losses that couple examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from ktrainer import Trainer
from ktrainer.errors import ModelError
from tests.pipeline.equal import pipeline, same
from tests.pipeline.whole import BUILD, Fit, configure, dense, one_process, train

Ranks = Callable[..., Any]

GLOBAL = ("trainer.loss_scope=global",)
RECOMPUTE = ("backend.recompute=true",)


def check(ranks: Ranks, fit: Fit, size: int, *words: str) -> None:
    words = (*pipeline(2, "backend.microbatches=3"), *words)
    ours = ranks(size).run(train, fit, words, deadline=150)
    print(f"largest difference {same(one_process(fit), ours, rtol=1e-12):.1e}")


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("fit", "size", "words"),
    [
        (Fit("simclr"), 2, ()),
        (Fit("clip"), 2, RECOMPUTE),
        (Fit("masked"), 2, ()),
        (Fit("two_losses"), 2, ()),
        (Fit("simclr"), 4, ("backend.placement=spread",)),
        (Fit("clip", rows=41), 4, ()),  # the last batch is one row: a replica without any
        (Fit("masked"), 4, ()),
        (Fit("two_losses", rows=41), 4, RECOMPUTE),
    ],
    ids=lambda v: v.model if isinstance(v, Fit) else None,
)
def test_losses_that_couple_examples(
    ranks: Ranks, fit: Fit, size: int, words: tuple[str, ...]
) -> None:
    check(ranks, fit, size, *GLOBAL, *words)


@pytest.mark.parametrize(
    ("fit", "size", "words"),
    [
        (Fit("adds"), 2, ("backend.schedule=zero_bubble",)),
        (Fit("weighs"), 2, ()),
        (Fit("leaves_out"), 2, ()),
        (Fit("weighs"), 4, GLOBAL),
        (Fit("vector"), 2, RECOMPUTE),
        (Fit("features"), 2, ()),
        (Fit("unreduced"), 2, ()),
        (Fit("adds"), 4, ()),
        (Fit("vector", rows=41), 4, ()),
        (Fit("adds", rows=41), 4, GLOBAL),
    ],
    ids=lambda v: v.model if isinstance(v, Fit) else None,
)
def test_losses_that_are_sums(ranks: Ranks, fit: Fit, size: int, words: tuple[str, ...]) -> None:
    check(ranks, fit, size, *words)


def _fit(build: Any, x: Any, *words: str) -> None:
    """Train one stage in this process, with the loss of the whole batch."""
    configure("float64")
    words = pipeline(1, "backend.microbatches=2", *GLOBAL, *words, "data.batch_size=8")
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
    class Reads(keras.Model):
        def compute_loss(
            self,
            x: Any = None,
            y: Any = None,
            y_pred: Any = None,
            sample_weight: Any = None,
            training: bool = True,
        ) -> Any:
            return ops.mean(y_pred) + ops.sum(self.layers[-1].kernel)

    def build() -> keras.Model:
        inputs = keras.Input((6,))
        model = Reads(inputs, dense(1, 1, name="last")(inputs))
        model.compile("sgd")
        return model

    with pytest.raises(ModelError, match=r"'last/kernel'.*read it in a layer's call"):
        _fit(build, np.ones((8, 6)))


def test_microbatches_are_not_gathered() -> None:
    with pytest.raises(ModelError, match=r"all_gather cannot.*trainer\.loss_scope=global"):
        _fit(BUILD["gathers"], np.ones((8, 6)), "trainer.loss_scope=local")


def test_two_replicas_compute_what_is_gathered_already(ranks: Ranks) -> None:
    fit = Fit("gathers")
    words = (*pipeline(1, "backend.microbatches=3"), *GLOBAL)
    same(one_process(fit), ranks(2).run(train, fit, words, deadline=150), rtol=1e-12)
