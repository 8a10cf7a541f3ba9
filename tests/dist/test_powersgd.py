"""`backend.compression=powersgd` in `fit`: resumed, skipped, scaled, accumulated and clipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Trainer
from ktrainer.checkpoint import read_checkpoint
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.errors import CheckpointError, ConfigError
from ktrainer.steps.powersgd import powersgd_of
from ktrainer.steps.sent_bytes import sent_bytes
from tests.dist.small import group_mode, make_trainer

ROWS = 60
QUIET: dict[str, Any] = {
    "checkpoint__resume": "never",
    "backend__compression": "powersgd",
    "backend__powersgd_rank": 2,
    "data__batch_size": 12,
    "data__shuffle": False,
    "health__audit_every": "1ba",
    "health__verify": "off",
}


def data(marked: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Rows; of the second batch one of rank 1 may be marked."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 24)).astype("float32")
    y = np.tanh(x @ random.normal(size=(24, 8)).astype("float32"))
    if marked:
        x[22, 0] = 101.0
    return x, y


class Poisoned(layers.Layer):
    """A bias whose gradient is NaN where a row is marked; what it computes is not."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(name="w", shape=(shape[-1],))

    def call(self, x: Any) -> Any:
        marked = tf.reduce_any(x[:, 0] > 100)

        @tf.custom_gradient
        def poisoned(w: Any) -> Any:
            return tf.identity(w), lambda up: tf.where(marked, up * float("nan"), up)

        return x / 10 + poisoned(self.w)


def build(optimizer: Any = None) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    inner = [layers.Dense(40, "tanh", name="wide"), layers.Dense(8, name="top")]
    model = keras.Sequential([keras.Input((24,)), Poisoned(name="first"), *inner])
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def fit(optimizer: Any = None, given: Any = None, **settings: Any) -> dict[str, Any]:
    """Train; the weights, and what this rank has yet to send."""
    with make_trainer(**{**QUIET, **settings}) as trainer:
        model = build(optimizer)
        history = trainer.fit(model, *(given or data())).history
        compression = powersgd_of(model)
        left = {} if compression is None else compression.memories
        return {
            "weights": [v.numpy() for v in model.variables],
            "left": [m.error.numpy() for m in left.values()],
            "basis": [m.basis.numpy() for m in left.values()],
            "loss": history["loss"],
        }


def same(one: dict[str, Any], other: dict[str, Any], parts: tuple[str, ...]) -> None:
    for part in parts:
        for a, b in zip(one[part], other[part], strict=True):
            np.testing.assert_array_equal(a, b, err_msg=part)


EVERYTHING = ("weights", "left", "basis")


def _variants() -> dict[str, dict[str, Any]]:
    """Trainings that must agree, or have a known result."""
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 2**8, 3)
    x, y = data(marked=True)
    cut = [np.delete(each, slice(12, 24), 0) for each in (x, y)]
    return {
        "plain": fit(),
        "exact": fit(backend__compression="none"),
        "scaled": fit(scaled),
        "accumulated": fit(trainer__accumulate=2, data__batch_size=6),
        "skipped": fit(given=(x, y), health__nan="skip"),
        "cut": fit(given=cut, health__nan="skip"),
        "clipped": fit(
            keras.optimizers.SGD(1.0), trainer__clip__global_norm=1e-3, trainer__max_steps=1
        ),
    }


def test_training(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(2).run(_variants, deadline=280)
    keras.utils.set_random_seed(1)
    start = [v.numpy() for v in build().variables]
    # Ranks have other rows of an update in parts, but together the same ones.
    for k in range(2):
        in_parts, at_once = (
            sum(found[name]["left"][k] for found in by_rank) for name in ("accumulated", "plain")
        )
        np.testing.assert_allclose(in_parts, at_once, rtol=1e-4, atol=1e-5)
    for found in by_rank:
        for name, other in found.items():
            same(other, by_rank[0][name], ("weights", "basis"))
        plain = found["plain"]
        assert [left.shape for left in plain["left"]] == [(24, 40), (40, 8)]
        assert all(np.abs(left).max() > 1e-3 for left in plain["left"])
        assert not found["exact"]["left"]
        assert plain["loss"][0] == pytest.approx(found["exact"]["loss"][0], rel=0.1)
        same(found["scaled"], plain, EVERYTHING)  # its scale doubles twice
        for a, b in zip(found["accumulated"]["weights"], plain["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        same(found["skipped"], found["cut"], EVERYTHING)
        moved = zip(found["clipped"]["weights"], start, strict=True)
        norm = np.sqrt(sum(np.sum((a - b) ** 2.0) for a, b in moved))
        assert norm == pytest.approx(1e-3, rel=1e-3)  # of what is applied, on all ranks


@pytest.mark.exhaustive
@pytest.mark.horovod
def test_horovod_has_the_bits_of_mpi(ranks: Callable[..., Any]) -> None:
    """A sum of two does not depend on their order; one update is skipped."""
    words = {"given": data(marked=True), "health__nan": "skip"}
    expected = ranks(2).run(fit, backend__engine="mpi", **words)
    found = ranks(2, group_mode("horovod")).run(fit, backend__engine="horovod", **words)
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs, EVERYTHING)


def _sent(compression: str) -> tuple[int, int]:
    """Bytes of an update that are summed over two ranks, counted; and foretold."""
    counted, sums = [], MpiGradients._sum_over_ranks

    def count(self: Any, array: np.ndarray, *given: Any) -> None:
        counted.append(array.nbytes)
        sums(self, array, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MpiGradients, "_sum_over_ranks", count)
        settings = {"backend__compression": compression, "health__nan": "ignore"}
        fit(**settings, trainer__max_steps=1)
    wire, low_rank = ("none", 2) if compression == "powersgd" else (compression, None)
    return sum(counted), sent_bytes(build().trainable_variables, 2, wire, low_rank)


@pytest.mark.quick("powersgd")
@pytest.mark.parametrize("compression", ["none", "fp16", "powersgd"])
def test_bytes_are_those_foretold(ranks: Callable[..., Any], compression: str) -> None:
    for counted, foretold in ranks(2).run(_sent, compression):
        assert counted == foretold


def _in(folder: str, **settings: Any) -> dict[str, Any]:
    settings = {"checkpoint__dir": folder, "checkpoint__every": "1ba", **settings}
    return fit(**{"checkpoint__resume": "auto", "trainer__epochs": 2, **settings})


def _problem(folder: str, **settings: Any) -> str:
    """What a run in a folder of checkpoints says, as an error or a warning of rank 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _in(folder, **settings)
        except CheckpointError as error:
            return str(error)
    return "\n".join(str(each.message) for each in caught)


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    group = ranks(2)
    expected = group.run(_in, whole, deadline=120)
    group.run(_in, cut, trainer__max_steps=7, deadline=120)  # in the second epoch
    for found, wanted in zip(group.run(_in, cut, deadline=120), expected, strict=True):
        same(found, wanted, EVERYTHING)
    arrays, state = read_checkpoint(sorted(Path(whole).glob("step-*"))[-1])
    places = state["powersgd"]["variables"]
    for rank, wanted in enumerate(expected):
        for place, left in zip(places, wanted["left"], strict=True):
            np.testing.assert_array_equal(arrays[f"powersgd/{place}/error@{rank}"], left)
    assert np.abs(expected[0]["left"][0] - expected[1]["left"][0]).max() > 1e-3
    # Other ranks: nothing is lost. One process sends nothing, and other ranks' products differ.
    three = ranks(3).run(_in, whole, trainer__epochs=2, deadline=120)
    for k in range(len(places)):
        total = sum(found["left"][k] for found in three)
        np.testing.assert_allclose(
            total, sum(found["left"][k] for found in expected), rtol=1e-5, atol=1e-6
        )
        assert all(not found["left"][k].any() for found in three[1:])
    assert "they are dropped" in _problem(whole)
    said = group.run(_problem, whole, backend__powersgd_rank=3, deadline=120)
    assert all("backend.powersgd_rank=2, and 3 is asked for" in each for each in said)


def test_what_cannot_be_combined_is_refused(tmp_path: Path) -> None:
    words = ["backend=data_parallel", "backend.compression=powersgd"]
    with pytest.raises(ConfigError, match="has yet to send of its gradients"):
        Trainer(overrides=[*words, "world.heal=true"])
    with pytest.raises(ConfigError, match="expected one of none, fp16, bf16"):
        Trainer(overrides=["backend=pipeline", "backend.partitions=1", words[1]])
    with Trainer(overrides=words) as trainer:
        with pytest.raises(ConfigError, match="a loop of your own"):
            trainer.distribute(tf.data.Dataset.range(4).batch(2))
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(ConfigError, match=r"use checkpoint\.every"):
            trainer.fit(build(), *data(), callbacks=[backup])
