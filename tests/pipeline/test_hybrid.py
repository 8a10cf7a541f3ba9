"""Copies of a model in stages: statistics, dropout, gradients in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.pipeline.equal import Case, copies_agree, local, pipeline, train


def _statistics() -> dict[str, np.ndarray]:
    """BatchNorm's after one update, where this process holds them."""
    import keras

    from ktrainer import Trainer
    from ktrainer.steps.variable_placement import placement_of

    def build() -> Any:
        norm = keras.layers.BatchNormalization(momentum=0.9, name="norm")
        model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        return model

    words = pipeline(2, "backend.microbatches=2", "backend.costs=uniform", "data.batch_size=16")
    quiet = ("data.shuffle=false", "logging.progress=none", "logging.csv=false")
    x = np.arange(48.0, dtype="float32").reshape(16, 3) ** 2 / 100
    with Trainer(overrides=[*words, *quiet]) as trainer:
        trainer.fit(build, (x, np.zeros((16, 2), "float32")))
        held = [v for v in trainer.model.variables if placement_of(trainer.model).holds(v)]
        return {v.name: v.numpy() for v in held if "moving" in v.name}


@pytest.mark.exhaustive
def test_statistics_are_the_average_of_what_copies_move(ranks: Callable[..., Any]) -> None:
    first, _, other, _ = ranks(4).run(_statistics)
    rows = (np.arange(48.0).reshape(16, 3) ** 2 / 100).reshape(2, 2, 4, 3)  # by copy, microbatch
    start = {"moving_mean": 0.0, "moving_variance": 1.0}
    for name, values in (("moving_mean", rows.mean(2)), ("moving_variance", rows.var(2))):
        moved = start[name] * 0.9**2 + 0.1 * (0.9 * values[:, 0] + values[:, 1])
        np.testing.assert_allclose(first[name], moved.mean(0), 1e-5)
        assert first[name].tobytes() == other[name].tobytes()


def _summed() -> str:
    """What is said of a statistic that is a sum over examples."""
    import keras

    from ktrainer import Trainer
    from ktrainer.backends.pipeline.runtime.stage_update import StageUpdate
    from ktrainer.errors import KtrainerError

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.seen = self.add_weight((), "zeros", trainable=False, aggregation="sum")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "float32"))
            return x

    def build() -> Any:
        layers = [Counting(name="counting"), keras.layers.Dense(2)]
        model = keras.Sequential([keras.Input((3,)), *layers], name="sequential")
        model.compile("sgd", "mse")
        return model

    words = pipeline(2, "backend.microbatches=2", "backend.costs=uniform", "data.batch_size=16")
    quiet = ("data.shuffle=false", "logging.progress=none", "logging.csv=false")

    original = StageUpdate.average

    def average(*args: Any) -> None:
        trainer.world.deadline = 5.0  # of ranks without the layer, which wait for the others
        original(*args)

    with (
        patch.object(StageUpdate, "average", average),
        Trainer(overrides=[*words, *quiet]) as trainer,
    ):
        try:
            trainer.fit(build, (np.zeros((16, 3), "float32"), np.zeros((16, 2), "float32")))
        except KtrainerError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.exhaustive
def test_statistics_that_are_sums_are_refused(ranks: Callable[..., Any]) -> None:
    first, _, other, _ = ranks(4, "ends").run(_summed)
    for said in (first, other):  # which have the layer
        assert "ModelError: sequential/counting/variable has aggregation" in said
        assert "Count it in a metric" in said


@pytest.mark.exhaustive
def test_dropout_repeats_in_every_run(ranks: Callable[..., Any]) -> None:
    """Copies hold the same weights, whatever they draw."""
    words = pipeline(2, "backend.microbatches=2")
    case = Case("cnn", rows=38, epochs=2)
    first, second = (ranks(4).run(train, case, words, deadline=150) for _ in range(2))
    copies_agree(first)
    for one, other in zip(first, second, strict=True):
        assert one.history == other.history
        assert {k: v.tobytes() for k, v in one.held.items()} == {
            k: v.tobytes() for k, v in other.held.items()
        }


def _masks(source: str) -> list[bytes]:
    """What a layer with dropout keeps in each microbatch of this process's copy."""
    import keras
    import tensorflow as tf

    from ktrainer import Trainer

    seen: list[bytes] = []

    def note(kept: Any) -> Any:
        seen.append((kept.numpy() > 0).tobytes())
        return kept

    shared = keras.random.SeedGenerator(1)

    class Noted(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            own = keras.random.SeedGenerator() if source == "its own generator" else None
            self.seeds = shared if source == "a shared generator" else own

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

        def call(self, x: Any, training: bool = False) -> Any:
            ones = keras.ops.ones_like(x)
            if source == "tf.random":
                kept = tf.cast(tf.random.uniform(tf.shape(x)) > 0.5, x.dtype)
            else:
                kept = keras.random.dropout(ones, 0.5, seed=self.seeds)
            kept = tf.ensure_shape(tf.py_function(note, [kept], x.dtype), x.shape)
            return x * tf.stop_gradient(kept)

    def build() -> Any:
        stack = [Noted(), keras.layers.Dense(6), Noted(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *stack])
        model.compile("sgd", "mse")
        return model

    stages = "backend.stages={0: 'noted|dense', 1: 'noted_1|dense_1'}"
    words = pipeline(2, "backend.microbatches=2", stages, "data.batch_size=16")
    quiet = ("trainer.max_steps=2", "logging.progress=none", "logging.csv=false")
    with Trainer(overrides=[*words, *quiet]) as trainer:
        keras.utils.set_random_seed(1)
        trainer.fit(build, (np.zeros((32, 6)), np.zeros((32, 3))))
    return seen


@pytest.mark.parametrize(
    "source", ["its own generator", "the global generator", "a shared generator", "tf.random"]
)
def test_stages_copies_and_microbatches_draw_masks_of_their_own(
    ranks: Callable[..., Any], source: str
) -> None:
    found = ranks(4).run(_masks, source)
    assert list(map(len, found)) == [4] * 4
    assert len(set().union(*found)) == 4 * 4


def test_gradients_between_copies_in_half_precision(ranks: Callable[..., Any]) -> None:
    """One update of SGD moves no weight further from its place than float16 rounds the copies'
    parts of its gradient, and their sum."""
    case = Case("plain", settings=("trainer.max_steps=1",), gradients=True)
    words = ("backend.microbatches=2", "backend.compression=fp16")
    ours = ranks(4).run(train, case, pipeline(2, *words), deadline=150)
    copies_agree(ours)
    expected, moved = local(case), 0.0
    for rank in ours:
        for name, gradient in rank.gradients.items():
            gap = np.abs(rank.held[name] - expected.held[name]).max()
            assert gap <= 0.1 * 2**-10 * 2 * np.abs(expected.gradients[name]).max(), name
            moved = max(moved, gap)
            np.testing.assert_allclose(gradient, expected.gradients[name], 0, 1e-2)
    assert moved > 0
