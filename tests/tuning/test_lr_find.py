"""`ktrainer lr-find`: losses equal a loop by hand, on any number of processes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.cli import main
from ktrainer.tuning.range_test_mode import VARIABLE, RangeTest, RangeTestDone
from ktrainer.tuning.rate_suggestion import RateCurve
from tests.processes import Done, ktrainer, python

UPDATES, ROWS = 30, 16
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8 * ROWS, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)

SCRIPT = """
import sys
import keras, numpy as np

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(128, 5)).astype("float32")
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 5, 0.5)), "mse")
stop = keras.callbacks.EarlyStopping("loss", patience=0, baseline=-1.0)
model.fit(x, x.sum(axis=1), batch_size=16, epochs=1, shuffle=False, callbacks=[stop], verbose=0)
raise RuntimeError("not reached")
"""


def build(rate: object) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu")])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
    return model


def by_hand(rates: list[float]) -> list[float]:
    model, losses = build(1.0), []
    for k, rate in enumerate(rates):
        model.optimizer.learning_rate = rate
        rows = slice(k % 8 * ROWS, (k % 8 + 1) * ROWS)
        model.reset_metrics()
        losses.append(float(model.train_on_batch(X[rows], Y[rows])[0]))
    return losses


@pytest.mark.parametrize("highest", [1.0, 1e-2])  # the loss diverges, or does not
def test_losses_are_those_of_a_loop_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, highest: float
) -> None:
    test = RangeTest(str(tmp_path), 1e-4, highest, UPDATES)
    monkeypatch.setenv(VARIABLE, test.to_environment()[VARIABLE])
    words = {"data": {"batch_size": ROWS, "shuffle": False}, "lr": {"warmup": "2ep"}}
    # Neither its rate, nor its epochs, validation and callbacks.
    stop = keras.callbacks.EarlyStopping("loss", patience=0)
    others = {"epochs": 9, "initial_epoch": 7, "validation_data": (X, Y), "callbacks": [stop]}
    with Trainer(words) as trainer:
        model = build(1e-9)
        with pytest.raises(RangeTestDone):
            trainer.fit(model, X, Y, **others)
    found = json.loads(test.result.read_text())
    # The loss after the update with the last rate is that of the next batch.
    expected = by_hand([*test.rates(), 0.0])[: len(found["losses"])]
    assert len(expected) == UPDATES + 1 or expected[-1] > 2 * min(expected)
    assert found["untested"] == 0
    np.testing.assert_allclose(found["losses"], expected, rtol=2e-4)
    np.testing.assert_allclose(found["rates"], test.rates()[: len(expected)], rtol=1e-12)
    if highest < 1.0:
        assert RateCurve.read(test.result).rates[-1] == pytest.approx(highest)


def test_updates_that_a_loss_scale_skips_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones: a scale this high is halved until the gradients are finite."""

    def scaled(rate: float) -> keras.Model:
        model = build(rate)
        scale = keras.optimizers.LossScaleOptimizer(model.optimizer, initial_scale=2.0**127)
        model.compile(scale, "mse")
        return model

    test = RangeTest(str(tmp_path), 1e-4, 1e-2, 20)
    monkeypatch.setenv(VARIABLE, test.to_environment()[VARIABLE])
    y = 100.0 * Y
    words = {"data": {"batch_size": ROWS, "shuffle": False}}
    with pytest.raises(RangeTestDone), Trainer(words) as trainer:
        trainer.fit(scaled(1.0), X, y)
    found = json.loads(test.result.read_text())
    model, losses, rows = scaled(1.0), list[float](), 0
    while len(losses) < 21:  # one after each of 20 rates, and the first
        made = int(model.optimizer.inner_optimizer.iterations.numpy())
        model.optimizer.inner_optimizer.learning_rate = [*test.rates(), 0.0][made]
        batch = slice(rows % 8 * ROWS, (rows % 8 + 1) * ROWS)
        loss = float(np.ravel(model.train_on_batch(X[batch], y[batch]))[0])
        model.reset_metrics()
        losses += [loss] if made == len(losses) else []
        rows += 1
    assert rows > 22  # some were skipped
    np.testing.assert_allclose(found["losses"], losses, rtol=2e-4)
    np.testing.assert_allclose(found["rates"], test.rates(), rtol=1e-12)


def test_rates_are_those_of_the_updates_that_a_step_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Keras' accumulation, whose `iterations` are fewer; and with three updates a step."""

    class Thrice(keras.Model):
        def train_step(self, batch: Any) -> dict[str, Any]:
            for _ in range(2):
                super().train_step(batch)
            return super().train_step(batch)

    def found(model: keras.Model, name: str) -> list[float]:
        test = RangeTest(str(tmp_path / name), 1e-6, 1e-3, UPDATES)
        test.result.parent.mkdir()
        monkeypatch.setenv(VARIABLE, test.to_environment()[VARIABLE])
        words = {"data": {"batch_size": ROWS, "shuffle": False}}
        with pytest.raises(RangeTestDone), Trainer(words) as trainer:
            trainer.fit(model, X, Y)
        assert all(map(math.isfinite, json.loads(test.result.read_text())["losses"]))
        return json.loads(test.result.read_text())["rates"]

    rates = RangeTest("", 1e-6, 1e-3, UPDATES).rates()
    model = build(1.0)
    model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), "mse")
    assert found(model, "accumulated") == rates
    inputs = keras.Input(X.shape[1:])
    thrice = Thrice(inputs, build(1.0)(inputs))
    thrice.compile(keras.optimizers.SGD(1.0), "mse")
    assert found(thrice, "thrice") == rates[::3]


def lr_find(tmp_path: Path, name: str, *words: str) -> tuple[Done, Path]:
    script, picture = tmp_path / "train.py", tmp_path / f"{name}.svg"
    script.write_text(SCRIPT)
    options = ["--picture", str(picture), "--max", "100", "--updates", "60"]
    *sizes, keys = words if words else ("",)
    command = ["lr-find", *options, *sizes, str(script), *([keys] if keys else [])]
    return ktrainer(*command, cwd=tmp_path), picture


def test_an_unmodified_script(tmp_path: Path) -> None:
    done, picture = lr_find(tmp_path, "one")
    assert done.returncode == 0, done.stderr
    assert "suggestion: 0." in done.stdout
    assert picture.exists()
    assert sorted(os.listdir(tmp_path)) == ["one.svg", "train.py"]  # no folder of a run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        ("-n", "2", "backend=data_parallel"),
        ("-n", "2", "backend={name: pipeline, partitions: 2, microbatches: 2}"),
    ],
)
def test_processes_find_the_same(words: tuple[str, ...], tmp_path: Path, one: list[str]) -> None:
    assert suggestions(lr_find(tmp_path, "several", *words)[0]) == one


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process suggests."""
    return suggestions(lr_find(tmp_path_factory.mktemp("one"), "one")[0])


def suggestions(done: Done) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "suggestion" in line]


def test_data_that_ends_before_the_test_does(tmp_path: Path) -> None:
    """A generator gives its batches once."""
    script, picture = tmp_path / "train.py", tmp_path / "curve.svg"
    batches = "((x[:16], x[:16].sum(axis=1)) for _ in range(15)), steps_per_epoch=15"
    script.write_text(SCRIPT.replace("x, x.sum(axis=1), batch_size=16", batches))
    done = ktrainer("lr-find", "--picture", picture, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended before the last 85 updates: rates above 8.3e-06" in done.stdout


def test_usage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "empty.py"
    script.write_text("print('hello')\n")
    assert main.main(["lr-find", "--min", "2", "--max", "1", str(script)]) == 2
    assert "--min=2 must be below --max=1" in capfd.readouterr().err
    assert main.main(["lr-find", "--updates", "5", str(script)]) == 2
    assert "give at least 20" in capfd.readouterr().err
    assert main.main(["lr-find", "--picture", "curve.png", str(script)]) == 2
    assert "name it curve.svg" in capfd.readouterr().err
    assert main.main(["lr-find", "--picture", str(tmp_path / "no" / "a.svg"), str(script)]) == 2
    assert "its folder is missing" in capfd.readouterr().err
    for words in (["--max", "inf"], ["--min", "nan"]):
        with pytest.raises(SystemExit):
            main.main(["lr-find", *words, str(script)])
        assert "above 0" in capfd.readouterr().err
    # In a process of its own: a launch ends all others below it, as the tests' groups of ranks.
    code = (
        "import os, sys; from ktrainer.cli import main\n"
        "code = main.main(['lr-find', sys.argv[1]])\n"
        f"assert {VARIABLE!r} not in os.environ; sys.exit(code)"
    )
    done = python("-c", code, script, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "ended without calling fit" in done.stderr
