"""Resume of models with a `tf.Variable` or `tf.random.Generator`, of which Keras does not know."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer, distributed
from ktrainer.steps.named_variables import attribute_variables, model_variables
from tests.training.test_resume_fit import data, settings

QUIET = ["logging.progress=none", "logging.csv=false"]
SETTINGS = {"trainer__accumulate": 1, "checkpoint__every": "5ba", "health__verify": "off"}


class Plain(keras.Model):
    """The model below, without what only TensorFlow knows of."""

    def __init__(self) -> None:
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3, name="head")(keras.layers.Dense(4, name="body")(inputs))
        super().__init__(inputs, outputs, name="alternating")


class Alternating(Plain):
    """Every second update goes the other way; each rank has noise, and a count, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n = tf.Variable(0)
        self.of_ranks = {"rows": [tf.Variable(0)]}
        self.noise = tf.random.Generator.from_seed(1 + distributed.current_world().rank)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        self.n.assign_add(1)
        self.of_ranks["rows"][0].assign_add(tf.shape(x)[0])
        sign = tf.where(self.n % 2 == 0, -1.0, 1.0)
        return super().train_step((sign * x + self.noise.normal(tf.shape(x)), y))


class Together(Alternating):
    """Stages must compute the same."""

    def __init__(self) -> None:
        super().__init__()
        self.noise.reset_from_seed(1)


def build(kind: Any = Alternating) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = kind()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def train(words: list[str], kind: Any = Alternating) -> dict[str, Any]:
    keras.utils.clear_session()
    with Trainer(overrides=words) as trainer:
        model = build(kind)
        trainer.fit(model, data())
        found = model_variables(model) + attribute_variables(model)
        return {name: np.array(v.numpy()).tolist() for name, v in found}


def in_parts(directory: str, kind: Any = Alternating, **more: Any) -> list[Any]:
    """A run without interruption, and one that was stopped inside of its second epoch."""
    whole = train(settings(Path(directory) / "whole", **SETTINGS, **more), kind)
    words = settings(Path(directory) / "parts", **SETTINGS, **more)
    train([*words, "trainer.max_steps=18"], kind)
    return [whole, train(words, kind)]


def test_they_continue_where_they_were(tmp_path: Path) -> None:
    whole, parts = in_parts(str(tmp_path))
    assert parts == whole
    assert whole["attribute/alternating/n"] == 30


def test_those_of_each_rank_are_its_own(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    (one, again), (two, _) = ranks(2).run(both_in_parts, str(tmp_path), deadline=120)
    assert one["attribute/alternating/n"] == two["attribute/alternating/n"] == 30
    assert one["attribute/alternating/noise"] != two["attribute/alternating/noise"]
    assert again
    # With fewer ranks, which a warning says; the run is over, so that is all.
    words = settings(tmp_path / "parts", backend="local", **SETTINGS)
    with pytest.warns(UserWarning, match="rank k continues with that of rank k modulo 2"):
        assert train(words)["attribute/alternating/noise"] == one["attribute/alternating/noise"]


def both_in_parts(directory: str) -> tuple[dict[str, Any], bool]:
    whole, parts = in_parts(directory, backend="data_parallel")
    return whole, parts == whole


@pytest.mark.exhaustive
def test_every_stage_has_them_again(tmp_path: Path, ranks: Callable[..., Any]) -> None:
    for whole, parts in ranks(2).run(in_stages, str(tmp_path), deadline=120):
        assert parts == whole
        assert whole["attribute/alternating/n"] == 30


def in_stages(directory: str) -> list[Any]:
    words = {"backend__partitions": 2, "backend__microbatches": 2}
    return in_parts(directory, Together, backend="pipeline", **words)


def test_ranks_whose_variables_differ_at_the_start_are_told(ranks: Callable[..., Any]) -> None:
    (text,), none = ranks(2).run(other_at_the_start)
    assert text.startswith("attribute/alternating/n: ranks have different values")
    assert none == []


def other_at_the_start() -> list[str]:
    model = build()
    model.n.assign(distributed.current_world().rank)
    words = ["backend=data_parallel", "trainer.max_steps=1", "health.verify=off", *QUIET]
    with warnings.catch_warnings(record=True) as said, Trainer(overrides=words) as trainer:
        warnings.simplefilter("always")
        trainer.fit(model, data())
    return [str(each.message) for each in said if "different values" in str(each.message)]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Plain, Alternating, "/n is not in the checkpoint"),
        (Alternating, Plain, "/n is in the checkpoint only"),
    ],
)
def test_a_checkpoint_without_them(tmp_path: Path, first: Any, second: Any, says: str) -> None:
    """As of earlier versions: the weights are restored, and a warning names the rest."""
    words = settings(tmp_path, **SETTINGS)
    weights = train([*words, "trainer.epochs=1"], first)
    with pytest.warns(UserWarning, match=says):
        again = train([*words, "trainer.epochs=1"], second)
    assert again["model/head/kernel"] == weights["model/head/kernel"]
