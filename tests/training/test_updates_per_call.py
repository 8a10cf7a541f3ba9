"""`trainer.steps_per_call=auto`: several updates in a call, with the bits of one each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Callback
from ktrainer.steps.compiled_program import CompiledProgram
from ktrainer.training import updates_per_call
from tests.contracts import running
from tests.contracts.zoo import ZOO
from tests.small import BATCH, Watch, build, data, trainer, weights

ROWS = 30 * BATCH


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates of each grouped call, in trainings that are shorter than those that group."""
    monkeypatch.setattr(updates_per_call, "FIRST_UPDATES", 2)
    monkeypatch.setattr(updates_per_call, "CALL_SECONDS", 60.0)  # compiling takes seconds
    found: list[int] = []
    train_many = CompiledProgram.train_many

    def counting(self: Any, *args: Any) -> Any:
        logs, made = train_many(self, *args)
        found.append(made)
        return logs, made

    monkeypatch.setattr(CompiledProgram, "train_many", counting)
    return found


def run(
    setting: int | str, callbacks: Any = (), model: Any = None, given: Any = None, **settings: Any
) -> tuple[list[np.ndarray], dict[str, list[float]], Any]:
    """Weights, History and progress of a training."""
    model, given = model or (lambda: build(eager=False)), given or data(ROWS)
    with trainer(callbacks, trainer__steps_per_call=setting, **settings) as it:
        history = it.fit(model, given)
        return weights(it), history.history, it.state.progress


def assert_same_bits(settings: dict[str, Any], **words: Any) -> None:
    (ours, history, at), (theirs, expected, there) = (
        run(setting, **words, **settings) for setting in ("auto", 1)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_equal(history, expected)
    assert (at.step, at.epoch, at.batch) == (there.step, there.epoch, there.batch)


@pytest.mark.quick("batch_norm_cnn", "two_inputs_two_outputs", "own_logs", "nested_logs")
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], name: str
) -> None:
    monkeypatch.setattr(running, "QUIET", {**running.QUIET, "data": {"shuffle": False}})
    settings = {"data": {"batch_size": 4}, "trainer": {"epochs": 2}}
    outcomes = []
    for setting in ("auto", 1):
        keras.backend.clear_session()
        settings["trainer"]["steps_per_call"] = setting
        outcomes.append(running.with_ktrainer(ZOO[name], **settings))
    running.assert_same(*outcomes)
    assert max(calls) > 3


@pytest.mark.exhaustive
def test_under_xla_to_the_bit(calls: list[int]) -> None:
    assert_same_bits({"trainer__xla": "true"})
    assert max(calls) > 3


def test_a_call_ends_where_something_is_due(calls: list[int], tmp_path: Any) -> None:
    class Logged(Watch):
        """Hears of steps, but says when."""

        def updates_until_due(self) -> int | None:
            return None

    settings = {
        "logging__every": "7ba",
        "checkpoint__every": "5ba",
        "checkpoint__keep": 9,
        "trainer__validate_every": "6ba",
        "trainer__max_steps": 26,
    }
    seen = Logged()
    with trainer([seen], **settings, checkpoint__dir=str(tmp_path)) as it:
        it.fit(lambda: build(eager=False), data(ROWS), validation_data=data(4))
    assert seen.logged == [7, 14, 21]
    assert seen.inside == [6, 12, 18, 24]
    saved = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("step-*"))
    assert saved[:5] == [5, 10, 15, 20, 25]
    assert seen.steps == [1, 2, 5, 6, 7, 10, 12, 14, 15, 18, 20, 21, 24, 25, 26]
    assert calls == [3, 3, 2, 2, 3, 2, 3]


@pytest.mark.parametrize("kind", ["keras", "ktrainer", "rate"])
def test_callbacks_that_may_act_in_every_step_do(calls: list[int], kind: str) -> None:
    """A rate that is set in each batch must be the rate of that batch."""

    class Rate(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)

    class OurRate(Callback):
        def on_step_begin(self, step: int) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + step)

    settings: dict[str, Any] = {}
    callbacks = {"keras": [Rate()], "ktrainer": [OurRate()], "rate": []}[kind]
    if kind == "rate":
        settings["lr__schedule"] = "[{start: 0ba, end: 20ba, multiplier: 0.5}]"
    assert_same_bits(settings, callbacks=callbacks)
    assert not calls


def test_a_loss_that_is_not_finite_stops_at_its_step(calls: list[int]) -> None:
    x, y = data(ROWS)
    x[17 * BATCH + 1] = np.nan
    with pytest.warns(UserWarning, match="the loss is not finite at step 18"):
        assert_same_bits({}, given=(x, y))
    assert calls == [16]


def test_batches_that_a_call_did_not_make_are_the_next_ones(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own callback may train on after the stop."""

    class Continue(Callback):
        def updates_until_due(self) -> int | None:
            return None

        def on_step_checkpoint(self, step: int, logs: Any = None) -> None:
            self.model.stop_training = False

    class Part(keras.Model):
        """Its loss is infinite for one batch, which leaves no trace in the weights."""

        def __init__(self) -> None:
            super().__init__()
            self.total = self.add_weight(shape=(), initializer="zeros")

        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            x, _ = batch
            self.total.assign(2 * self.total + x[0, 0])
            return {"loss": 1.0 / x[0, 1]}

    def model() -> keras.Model:
        made = Part()
        made.compile("sgd", "mse", jit_compile=False)
        return made

    x = np.stack([np.arange(ROWS), np.arange(ROWS) != 12 * BATCH], axis=1).astype("float32")
    with pytest.warns(UserWarning, match="the loss is not finite at step 13"):
        assert_same_bits({}, model=model, given=(x, x), callbacks=[Continue()])
    assert calls[0] == 11
    assert sum(calls) == 28


def test_numbers_that_a_step_draws_are_not_drawn_twice(calls: list[int]) -> None:
    class Noise(layers.Layer):
        def call(self, x: Any) -> Any:
            return x + tf.random.normal(tf.shape(x), seed=3)

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((6,)), Noise(), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile("sgd", loss, jit_compile=False)
        return made

    assert_same_bits({}, model=model)
    assert not calls


def test_labels_of_64_bits_stay_as_they_are(calls: list[int]) -> None:
    seen: list[Any] = []

    class Large(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.total = self.add_weight(shape=(), dtype="int64", initializer="zeros")

        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            seen.append(batch[1].dtype)
            self.total.assign_add(tf.reduce_sum(batch[1]))
            return {"loss": 0.0}

    def model() -> keras.Model:
        made = Large()
        made.compile("sgd", "mse", jit_compile=False)
        return made

    y = np.arange(ROWS) + 2**40
    (total, *_), _, _ = run("auto", model=model, given=(data(ROWS)[0], y))
    assert set(seen) == {tf.int64}
    assert total == y.sum()
    assert calls == [28]


def test_slow_data_is_not_waited_for(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates_per_call, "CALL_SECONDS", 0.2)
    monkeypatch.setattr(updates_per_call, "FIRST_UPDATES", 20)

    def batches() -> Iterator[Any]:
        x, y = data(50 * BATCH)
        for i in range(50):
            if i >= 30:
                time.sleep(0.3)
            yield x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]

    run("auto", given=batches())
    assert calls[0] > 5
    assert max(calls[1:], default=1) <= 5  # a few were read ahead
