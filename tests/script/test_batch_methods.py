"""Single batches through a Trainer: what Keras' own methods return."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.script.batch_methods import BatchMethods


class OwnSteps(keras.Model):
    """Its steps take apart what they are given, as a triple."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y, weight = data
        results, ours = self.results(x, y, weight), self.trainable_variables
        self.optimizer.apply([keras.ops.ones_like(v) for v in ours], ours)
        return results

    def test_step(self, data: Any) -> Any:
        return self.results(*data)

    def results(self, x: Any, y: Any, weight: Any) -> Any:
        errors = keras.ops.mean(self(x) if y is None else self(x) - y, axis=-1)
        return {"error": keras.ops.mean(errors if weight is None else weight * errors)}


def results(methods: Any) -> list[float]:
    model = OwnSteps()
    model.compile("sgd")
    x, y, weight = np.ones((4, 2), "f"), np.ones((4, 1), "f"), np.arange(4, dtype="f")
    parts = {"x": x}, {"x": x, "y": y}, {"x": x, "sample_weight": weight}
    found = []
    for given in (*parts, {"x": x, "y": y, "sample_weight": weight}):
        for name in ("train_on_batch", "test_on_batch"):
            found.append(float(getattr(methods, name)(model, **given, return_dict=True)["error"]))
    return found


def test_steps_are_given_three_parts() -> None:
    with Trainer({"logging": {"progress": "none"}}) as trainer:
        assert results(BatchMethods(trainer)) == results(keras.Model)


class OwnLoss(OwnSteps):
    """Logs its own loss under the name of the tracker that `compile` makes, and never updates."""

    def results(self, x: Any, y: Any, weight: Any) -> Any:
        return {"loss": super().results(x, y, weight)["error"]}


def own_losses(methods: Any, run: Any) -> list[float]:
    """The losses that single batches return and log; the tracker has 0."""
    model, seen = OwnLoss(), []
    model.compile("sgd")
    x, y = np.arange(8, dtype="f").reshape(4, 2), np.ones((4, 1), "f")
    for name in ("train_on_batch", "test_on_batch"):
        seen.append(getattr(methods, name)(model, x, y))
    note = keras.callbacks.Callback()
    note.on_train_batch_end = note.on_test_batch_end = lambda _, logs: seen.append(logs["loss"])
    given = {"sample_weight": np.ones(4, "f"), "batch_size": 4, "verbose": 0, "callbacks": [note]}
    run.fit(model, x, y, **given)
    run.evaluate(model, x, y, **given)
    return [float(loss) for loss in seen]


def own_losses_of_ranks(backend: str, folder: str) -> list[float]:
    logging = {"progress": "none", "batch_logs": "all"}
    with Trainer({"backend": backend, "logging": logging, "run": {"dir": folder}}) as trainer:
        return own_losses(BatchMethods(trainer), trainer)


def test_a_loss_of_the_models_own_is_that_of_the_batch(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    expected = own_losses(keras.Model, keras.Model)
    assert min(expected) > 0
    of_ranks = ranks(2).run(own_losses_of_ranks, "data_parallel", str(tmp_path / "two"))
    for losses in (own_losses_of_ranks("local", str(tmp_path / "one")), *of_ranks):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_keys_without_effect_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["logging.progress=none", "trainer.max_steps=3", "health.nan=skip", "trainer.xla=false"]
    for fits, said in ((0, 1), (1, 0)):
        with Trainer(overrides=words) as trainer:
            trainer.state.fits, methods, model = fits, BatchMethods(trainer), OwnSteps()
            model.compile("sgd")
            for _ in range(2):
                methods.train_on_batch(model, np.ones((4, 2), "f"))
        line = "no effect on train_on_batch: trainer.max_steps, health.nan. It reads none of these"
        assert capsys.readouterr().err.count(line) == said


class Counting(keras.Model):
    """Counts how often it is traced."""

    traces = 0

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        self.traces += 1
        return self.dense(x)


def test_batches_between_calls_are_not_traced_again() -> None:
    model, x, y = Counting(), np.ones((8, 2), "f"), np.ones((8, 1), "f")
    model.compile("sgd", "mse")
    with Trainer({"logging": {"progress": "none"}}) as trainer:
        methods, traces = BatchMethods(trainer), []
        for _ in range(3):
            trainer.fit(model, x, y, batch_size=8)
            methods.train_on_batch(model, x, y)
            trainer.evaluate(model, x, y, batch_size=8)
            methods.test_on_batch(model, x, y)
            traces.append(model.traces)
    assert traces == traces[:1] * 3


def _printed_of_statistics() -> str:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    printed = io.StringIO()
    with (
        Trainer({"backend": "data_parallel", "logging": {"progress": "none"}}) as trainer,
        contextlib.redirect_stderr(printed),
    ):
        methods = BatchMethods(trainer)
        for _ in range(2):
            methods.train_on_batch(model, np.ones((4, 2), "f"), np.ones((4, 1), "f"))
    return printed.getvalue()


def test_what_cannot_equal_one_process_is_named_once(ranks: Callable[..., Any]) -> None:
    root, other = ranks(2).run(_printed_of_statistics)
    assert root.count("norm (BatchNormalization) uses the statistics of each local batch") == 1
    assert "BatchNormalization" not in other
