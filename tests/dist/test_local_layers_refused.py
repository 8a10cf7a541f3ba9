"""`backend.local_layers`: what is refused, what is skipped, and which slots belong to a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Trainer
from ktrainer.checkpoint.export.export_model import export_model
from ktrainer.errors import ConfigError, KtrainerError, ModelError
from ktrainer.steps.local_layers import local_paths, local_variables, set_local_layers
from ktrainer.steps.named_variables import all_variables
from tests.dist.small import make_trainer

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def build(optimizer: Any = "sgd") -> keras.Model:
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="wide")], name="inner")
    body = [keras.Input((3,)), layers.Dense(4, name="body"), layers.Dropout(0.1, name="drop")]
    model = keras.Sequential([*body, inner, layers.Dense(1, name="head")])
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def trainer(*patterns: str, **settings: Any) -> Trainer:
    return make_trainer(
        backend__local_layers=list(patterns), checkpoint__resume="never", **settings
    )


def refusal(of: Trainer, model: keras.Model, **given: Any) -> KtrainerError:
    with of, pytest.raises(KtrainerError) as caught:
        of.fit(model, X, Y, **given)
    return caught.value


def test_a_pattern_matches_whole_names_from_the_model_down() -> None:
    error = refusal(trainer("head", "hea"), build())
    assert isinstance(error, ConfigError)
    assert error.path == "backend.local_layers[1]"
    assert "'hea' matches no layer. The nearest names are 'head'" in str(error)
    model = build()
    inner = ["inner/wide/kernel", "inner/wide/bias"]
    for patterns, expected in (
        ([], []),
        (["head"], ["head/kernel", "head/bias"]),
        (["inner/.*"], inner),
        (["inner", "head/bias"], [*inner, "head/bias"]),
        (["drop"], ["drop/seed_generator_state"]),
    ):
        set_local_layers(model, patterns)
        assert local_paths(model) == expected
        local = local_variables(model)
        assert sum(id(v) in local for v in model.variables) == len(expected)


@pytest.mark.parametrize(
    "name",
    ["SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
     "Ftrl", "Lion", "Lamb", "Muon"],
)  # fmt: skip
def test_every_slot_of_a_local_weight_is_local(name: str) -> None:
    settings: dict[str, Any] = {"use_ema": True, "gradient_accumulation_steps": 2}
    settings |= {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    model = build(getattr(keras.optimizers, name)(**settings))
    set_local_layers(model, ["head"])
    named = all_variables(model)  # builds it
    local = local_variables(model)
    slots = [v for v in model.optimizer.variables if tuple(v.shape)]
    found = [v for v in slots if id(v) in local]
    if name == "Adafactor":  # whose slots are not named after weights
        assert 3 * len(found) == len(slots)  # the head has two of six weights
    else:
        assert {v.name for v in found} == {v.name for v in slots if "head" in v.name}
    assert len(found) >= 2 * 3  # its own, averages, sums of gradients
    assert {n for n, v in named if id(v) in local} >= {n for n, v in named if "head/" in v.path}


class OwnSlots(keras.optimizers.SGD):
    """Keeps slots where nobody can tell what they are of."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.kept = {str(k): self.add_variable((3,), name=f"kept_{k}") for k in range(2)}


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), "use clipnorm or clipvalue"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "bfloat16"),
        (lambda: OwnSlots(), "cannot be told whether they belong to a local layer: kept_0, kept_1"),
    ],
    ids=["clipped", "scaled", "slots"],
)
def test_optimizers_that_would_mix_ranks(optimizer: Callable[[], Any], says: str) -> None:
    error = refusal(trainer("head"), build(optimizer()))
    assert isinstance(error, ModelError)
    assert says in str(error)


def test_loops_and_callbacks(tmp_path: Path) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert "use checkpoint.every" in str(refusal(trainer("head"), build(), callbacks=[backup]))
    with trainer("head") as it, pytest.raises(ConfigError, match="PartialDistributedGradientTape"):
        it.distribute(tf.data.Dataset.range(4).batch(2))


class Poisoned(layers.Layer):
    """Its gradient is NaN where a row is marked; what it computes is not."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(name="w", shape=(shape[-1], 1), initializer="ones")

    def call(self, x: Any) -> Any:
        marked = tf.reduce_any(x[:, 0] > 100)

        @tf.custom_gradient
        def poisoned(w: Any) -> Any:
            return tf.identity(w), lambda up: tf.where(marked, up * float("nan"), up)

        return tf.matmul(x / 100, poisoned(self.w))


def with_nan_on_one_rank(folder: str) -> Any:
    """Of three batches of four rows the second one has a marked row, which is rank 1's."""
    found = []
    for skipped in (True, False):
        keras.utils.set_random_seed(1)
        x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
        x[7, 0] = 101.0
        if not skipped:
            x = np.delete(x, slice(4, 8), 0)
        model = keras.Sequential([keras.Input((3,)), Poisoned(name="own"), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        settings = {"health__nan": "skip", "data__batch_size": 4, "data__shuffle": False}
        settings |= {"run__dir": folder, "health__audit_every": "1ba", "health__verify": "off"}
        with trainer("own", **settings) as it:
            it.fit(model, x, x.sum(1, keepdims=True))
            found.append([v.numpy() for v in model.variables])
    return found


def test_an_update_that_one_rank_must_skip_is_skipped_by_all(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    by_rank = ranks(2).run(with_nan_on_one_rank, str(tmp_path / "run"))
    for skipped, without in by_rank:
        for value, expected in zip(skipped, without, strict=True):
            np.testing.assert_array_equal(value, expected)
    first, second = (skipped for skipped, _ in by_rank)
    assert np.abs(first[0] - second[0]).max() > 1e-3  # each rank's own
    np.testing.assert_array_equal(first[1], second[1])


def test_a_file_of_a_checkpoint_has_the_layers_of_rank_0(tmp_path: Path) -> None:
    settings = {"checkpoint__every": "1ep", "run__dir": tmp_path / "run"}
    model = build()
    with trainer("head", **settings) as it:
        it.fit(model, X, Y)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    export_model(checkpoint, tmp_path / "model.weights.h5")
    fresh = build(None)
    fresh.load_weights(tmp_path / "model.weights.h5")  # not of the package
    for value, expected in zip(fresh.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
