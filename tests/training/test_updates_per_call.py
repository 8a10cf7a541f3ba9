"""`trainer.steps_per_call=auto`: several updates in a call, with the bits of one each."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Callback, ConfigError
from ktrainer.callbacks import LossGuard
from ktrainer.data import LocalBatch
from ktrainer.steps.compiled_program import CompiledProgram
from ktrainer.steps.train_many import StepLoop
from ktrainer.training import updates_per_call
from tests.contracts import running
from tests.contracts.zoo import ZOO
from tests.small import BATCH, Listens, Watch, build, data, trainer, weights

ROWS = 30 * BATCH


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates of each grouped call, in trainings that are shorter than those that group."""
    monkeypatch.setattr(updates_per_call, "FIRST_UPDATES", 2)
    monkeypatch.setattr(updates_per_call, "MAX_SECONDS", 3600.0)  # compiling takes seconds
    return count_updates(monkeypatch, CompiledProgram, "train_many")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates of each compiled call of several."""
    return count_updates(monkeypatch, StepLoop, "__call__")


def count_updates(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[int]:
    """The updates of each call, from here on, of a method that returns their logs."""
    found: list[int] = []
    method = getattr(kind, name)

    def counting(self: Any, *args: Any) -> Any:
        logs = method(self, *args)
        found.append(len(logs))
        return logs

    monkeypatch.setattr(kind, name, counting)
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


QUICK = ("batch_norm_cnn", "two_inputs_two_outputs", "own_logs", "nested_logs")
# Two optimizers, averages, loops inside of the step, metrics that Keras wraps, random numbers.
OTHERS = ("gan", "averaged_weights", "masked_lstm", "many_metrics", "vae")


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
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
        """Writes down the steps at which calls end."""

        def max_updates_per_call(self) -> int | None:
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


class KerasBatchCallback(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


class StepCallback(Callback):
    def on_step_begin(self, step: int) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + step)


class LossGuardSubclass(LossGuard):
    """Inherits `max_updates_per_call`, which knows nothing of its own event."""

    def on_step_begin(self, step: int) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + step)


class TwoBases(LossGuard, StepCallback):
    """The same of an event of its other base."""


class SuperOfTwoBases(LossGuard, KerasBatchCallback):
    """`ktrainer.Callback`, between the two, calls the event of the last."""


class InstanceAttribute(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.on_train_batch_begin = self.set_rate

    def set_rate(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


STEP_CALLBACKS = (
    *(KerasBatchCallback, StepCallback, LossGuardSubclass),
    *(TwoBases, SuperOfTwoBases, InstanceAttribute),
)


@pytest.mark.parametrize("kind", STEP_CALLBACKS)
def test_callbacks_of_steps_run_at_every_step(calls: list[int], kind: Any) -> None:
    run("auto", [kind()])
    assert not calls


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_that_is_set_in_each_batch_is_the_rate_of_that_batch(
    calls: list[int], scheduled: bool
) -> None:
    settings: dict[str, Any] = {}
    if scheduled:
        settings["lr__schedule"] = "[{start: 0ba, end: 20ba, multiplier: 0.5}]"
    assert_same_bits(settings, callbacks=[] if scheduled else [KerasBatchCallback()])
    assert not calls


def test_a_limit_below_one_is_one() -> None:
    class Late(Watch):
        def max_updates_per_call(self) -> int | None:
            return 10 - self.progress.step

    seen = Late()
    run("auto", [seen])
    assert seen.steps == [1, 2, *range(10, 31)]


def test_a_loss_that_is_not_finite_stops_at_its_step(calls: list[int]) -> None:
    x, y = data(ROWS)
    x[17 * BATCH + 1] = np.nan
    with pytest.warns(UserWarning, match="the loss is not finite at step 18"):
        assert_same_bits({}, given=(x, y))
    assert calls == [16]


def test_training_on_after_a_stop_inside_a_call_is_refused(calls: list[int]) -> None:
    """The batches that the call did not use are no longer in the data."""

    class Continue(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = False

    x, y = data(ROWS)
    x[17 * BATCH + 1] = np.nan
    with (
        pytest.warns(UserWarning, match="the loss is not finite at step 18"),
        pytest.raises(ConfigError, match=r"12 more batches .* Set trainer.steps_per_call=1"),
    ):
        run("auto", [Continue()], given=(x, y))


def test_an_error_of_the_data_comes_after_the_updates_before_it(calls: list[int]) -> None:
    def batches() -> Iterator[Any]:
        x, y = data(50 * BATCH)
        for i in range(21):
            yield x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]
        raise RuntimeError("no more rows")

    with trainer(data__prefetch=0) as it:
        with pytest.raises(RuntimeError, match="no more rows"):
            it.fit(lambda: build(eager=False), batches())
        assert it.state.progress.step == 21
    assert sum(calls) == 19


class Seen(keras.Model):
    """Counts how often it is trained on each example."""

    def __init__(self) -> None:
        super().__init__()
        self.times = self.add_weight(shape=(ROWS,), initializer="zeros")

    def call(self, x: Any) -> Any:
        return x

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.times.assign_add(tf.reduce_sum(tf.one_hot(batch[0], ROWS), axis=0))
        return {"loss": 0.0}


@pytest.mark.parametrize(("after", "in_calls"), [(2, 0), (12, 11)])
def test_a_signal_comes_after_the_updates_whose_batches_were_taken(
    calls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, in_calls: int
) -> None:
    """The resumed run sees each example once, though the order is another one each time."""

    def train() -> np.ndarray:
        settings = {"checkpoint__dir": str(tmp_path), "checkpoint__resume": "auto"}
        with trainer(**settings, checkpoint__every="1ep") as it:
            model = Seen()
            model.compile("sgd", "mse", jit_compile=False)
            numbers = np.arange(ROWS)
            rows = tf.data.Dataset.from_tensor_slices((numbers, numbers)).shuffle(ROWS)
            it.fit(model, rows.batch(BATCH))
            return np.array(model.times.numpy())

    take = updates_per_call.UpdatesPerCall.take

    def interrupted(batches: Iterator[Any]) -> Iterator[Any]:
        for taken in range(ROWS):
            if taken == after:
                os.kill(os.getpid(), signal.SIGTERM)
            yield next(batches)

    with monkeypatch.context() as patch:
        source: list[Any] = []

        def taking(self: Any, batches: Any, *args: Any) -> Any:
            source[:] = source or [interrupted(batches)]
            return take(self, source[0], *args)

        patch.setattr(updates_per_call.UpdatesPerCall, "take", taking)
        with pytest.raises(SystemExit):
            train()
    assert sum(calls) == in_calls  # with the one whose batch was waited for
    np.testing.assert_array_equal(train(), 1.0)


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


def test_batches_may_hold_none(calls: list[int]) -> None:
    x, y = data(ROWS)

    def batches() -> Iterator[Any]:
        for start in range(0, ROWS, BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH], None

    assert_same_bits({}, given=batches)
    assert calls == [28]


@pytest.mark.parametrize("nan", ["stop", "every third", "ignore"])
def test_a_number_of_steps_per_call_and_a_loss_that_is_not_finite(
    calls: list[int], nan: str
) -> None:
    """Only a guard that looks at every step ends a call."""
    x, y = data(ROWS)
    x[17 * BATCH + 1] = np.nan
    guard = [LossGuard(every=3)] if nan == "every third" else []
    settings = {"trainer__steps_per_call": 10, "health__nan": "stop" if nan == "stop" else "ignore"}
    stops = {"stop": 18, "every third": 20, "ignore": 30}[nan]
    with trainer(guard, **settings) as it, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        it.fit(lambda: build(eager=False), (x, y))
        assert it.state.progress.step == stops
    assert sum(calls) == stops


def test_a_loss_of_whole_numbers_is_finite(calls: list[int]) -> None:
    """Whatever other logs are: as `losses_are_finite` has it."""

    class Whole(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": tf.constant(1), "mae": tf.constant(np.nan)}

    def model() -> keras.Model:
        made = Whole()
        made.compile("sgd", "mse", jit_compile=False)
        return made

    run("auto", model=model, logging__every="100ba")
    assert sum(calls) == 28


class Clock:
    """A clock that stands still but for what is added to it."""

    def __init__(self) -> None:
        self.now = 0.0

    def batches(self, count: int, seconds: Callable[[int], float]) -> Iterator[LocalBatch]:
        """Batches of which each is made in so many seconds while the one before is used."""
        ready = 0.0
        for i in range(count):
            self.now = max(self.now, ready)
            ready = self.now + seconds(i)
            yield LocalBatch(np.array([i]), 1, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which `auto` decides."""
    it = Clock()
    monkeypatch.setattr(updates_per_call, "FIRST_UPDATES", 100)
    monkeypatch.setattr(updates_per_call, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(time, "perf_counter", lambda: it.now)
    return it


@pytest.mark.parametrize("seconds", [0.0001, 0.003])
def test_data_that_takes_longer_than_steps_is_made_while_they_run(
    clock: Clock, seconds: float
) -> None:
    """A step of 1 ms in Python and 1 ms in TensorFlow, beside which 1 batch is made."""
    per_call = updates_per_call.UpdatesPerCall("auto", lambda: True)
    source, sizes, seen = clock.batches(2000, lambda _: seconds), [], []
    while updates := per_call.take(source, None, lambda: None):
        clock.now += 0.001 + 0.001 * len(updates)
        per_call.end_call(updates, len(updates))
        sizes.append(len(updates))
        seen += [int(part.batch[0]) for update in updates for part in update]
    assert seen == list(range(2000))
    assert max(sizes) > 9
    assert (sizes[-2] > 9) == (seconds < 0.002)


def test_slow_data_is_not_waited_for(clock: Clock) -> None:
    """From batch 500 on, each is waited for longer than a call may take."""
    per_call = updates_per_call.UpdatesPerCall("auto", lambda: True)
    source, ends, sizes = clock.batches(600, lambda i: 0.3 if i >= 499 else 0.0), [], []
    while updates := per_call.take(source, None, lambda: None):
        clock.now += 0.001 + 0.001 * len(updates)
        per_call.end_call(updates, len(updates))
        ends.append(int(updates[-1][-1].batch[0]))
        sizes.append(len(updates))
    assert max(sizes[:-100]) > 9
    assert ends[-100:] == list(range(500, 600))


def test_callbacks_between_calls_count_and_one_long_call_does_not(clock: Clock) -> None:
    """An update of 1 ms, and 1 ms between calls, one of which takes a second longer."""
    per_call = updates_per_call.UpdatesPerCall("auto", lambda: True)
    source, sizes = clock.batches(2000, lambda _: 0.0), []
    while updates := per_call.take(source, None, lambda: None):
        clock.now += 0.001 * len(updates) + (1.0 if len(sizes) == 102 else 0.0)
        per_call.end_call(updates, len(updates))
        sizes.append(len(updates))
        clock.now += 0.001
    assert max(sizes[100:103]) > 9
    assert sizes[-2] > 9


@pytest.mark.parametrize(("every", "seconds"), [(20, 0.02), (20, 0.1), (50, 0.03)])
def test_validation_between_calls_does_not_count(clock: Clock, every: int, seconds: float) -> None:
    """It follows each long call, which ends there, and few short ones."""
    made = 0
    per_call = updates_per_call.UpdatesPerCall("auto", lambda: True)
    source, sizes = clock.batches(2000, lambda _: 0.0), []
    while updates := per_call.take(source, None, partial(int, every - made % every)):
        clock.now += 0.001 if len(updates) == 1 else 0.0005 * len(updates)
        per_call.end_call(updates, len(updates))
        made += len(updates)
        sizes.append(len(updates))
        clock.now += seconds * (made % every == 0)
    assert sizes[-2] > 9


def test_what_is_faster_is_compared_again(clock: Clock) -> None:
    """Data takes longer than steps until update 1000, as while it is read for the first time."""
    per_call = updates_per_call.UpdatesPerCall("auto", lambda: True)
    source, sizes = clock.batches(6000, lambda i: 0.003 if i < 1000 else 0.0), []
    while updates := per_call.take(source, None, lambda: None):
        clock.now += 0.001 + 0.001 * len(updates)
        per_call.end_call(updates, len(updates))
        sizes += [len(updates)] * len(updates)
    assert max(sizes[100:200]) > 9
    assert max(sizes[300:650]) == 1  # then compared again, and at three times as many updates
    assert max(sizes[850:2300]) == 1
    assert min(sizes[2500:-50]) > 9


def sizes_of_three_passes(
    clock: Clock, batches: int, first_seconds: float, resumed: bool = False
) -> list[int]:
    """For each update, how many its call makes.

    Args:
        first_seconds: for a batch in the first pass, after which a dataset is cached.
        resumed: whether an epoch comes before, of which a resume has left nothing.
    """
    per_call, sizes = updates_per_call.UpdatesPerCall("auto", lambda: True), []
    if resumed:
        assert not per_call.take(iter(()), None, lambda: None)
    for seconds in (first_seconds, 0.0, 0.0):
        source = clock.batches(batches, lambda _, seconds=seconds: seconds)
        while updates := per_call.take(source, None, lambda: None):
            clock.now += 0.001 + 0.001 * len(updates)
            per_call.end_call(updates, len(updates))
            sizes += [len(updates)] * len(updates)
    return sizes


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("batches", [90, 100, 300])
def test_what_is_faster_is_compared_after_the_first_pass_over_the_data(
    clock: Clock, batches: int, resumed: bool
) -> None:
    """By then a dataset is cached."""
    sizes = sizes_of_three_passes(clock, batches, 0.003, resumed)
    assert max(sizes[batches - 50 : batches + 30]) == 1
    assert 1 not in sizes[batches + 50 :]


def test_what_is_still_being_compared_is_compared_anew_after_the_first_pass(clock: Clock) -> None:
    sizes = sizes_of_three_passes(clock, 180, 0.003)
    assert max(sizes[:100]) == max(sizes[180:210]) == 1
    assert 1 not in [*sizes[100:180], *sizes[210:]]


def test_longer_calls_that_have_proved_faster_stay_after_the_first_pass(clock: Clock) -> None:
    """They are compared again when there are three times as many updates."""
    sizes = sizes_of_three_passes(clock, 300, 0.0)
    assert max(sizes[:100]) == 1
    assert 1 not in sizes[100:600]
    assert sizes[600:].count(1) == updates_per_call.COMPARED_UPDATES


class ListensToSteps(Listens, Callback):
    """The same as a callback of ktrainer, which has events of steps as well."""

    max_updates_per_call = Listens.max_updates_per_call

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.heard.append(("step",))


def of_batches(callback: Any) -> list[tuple[Any, ...]]:
    return [event for event in callback.heard if event != ("step",)]


@pytest.mark.parametrize("setting", ["auto", 7])
@pytest.mark.parametrize("kind", [Listens, ListensToSteps])
def test_a_callback_hears_of_each_batch_of_a_call(
    loops: list[int], kind: Any, setting: int | str
) -> None:
    """In their order, with the logs that it would have got in between."""
    later, at_once = kind(), kind()
    run(setting, [later], trainer__epochs=2, logging__every="11ba")
    assert max(loops) > 3
    run(1, [at_once], trainer__epochs=2, logging__every="11ba")
    assert of_batches(later) == of_batches(at_once)
    assert len(of_batches(later)) == 2 * 2 * 30
    assert kind is Listens or later.heard.count(("step",)) < 60


@pytest.mark.parametrize("setting", ["auto", 7])
def test_a_loss_that_is_not_finite_is_the_last_that_is_heard_of(
    calls: list[int], setting: int | str
) -> None:
    x, y = data(ROWS)
    x[17 * BATCH + 1] = np.nan
    later, at_once = Listens(), Listens()
    for callback, each in ((later, setting), (at_once, 1)):
        with pytest.warns(UserWarning, match="the loss is not finite at step 18"):
            run(each, [callback], given=(x, y))
    assert max(calls) > 3
    np.testing.assert_equal(later.heard, at_once.heard)
    assert later.heard[-1][:2] == ("end", 17)


def logs_of_some_shape(rows: int | str | None) -> Callable[[], keras.Model]:
    """A model whose logs have a number for each example, of so many or of an unknown number; or
    that has "no logs"."""

    class Errors(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            if rows == "no logs":
                return {}
            errors = tf.ensure_shape(tf.reduce_sum(batch[0] ** 2, 1), [rows])
            return {"loss": tf.reduce_mean(errors), "errors": errors, "deep": {"sum": errors[0]}}

    def model() -> keras.Model:
        made = Errors()
        made.compile("sgd", "mse", jit_compile=False)
        return made

    return model


@pytest.mark.parametrize("rows", [BATCH, None, "no logs"])
def test_logs_of_any_shape_are_heard_of(
    calls: list[int], loops: list[int], rows: int | str | None
) -> None:
    """Also those that do not stack, of updates that are made singly."""
    later, at_once = Listens(), Listens()
    run("auto", model=logs_of_some_shape(rows), logging__every="100ba")
    unheard = list(loops)
    run("auto", [later], model=logs_of_some_shape(rows), logging__every="100ba")
    assert max(calls) > 3
    assert loops == unheard * (1 if rows is None else 2)
    run(1, [at_once], model=logs_of_some_shape(rows), logging__every="100ba")
    np.testing.assert_equal(later.heard, at_once.heard)


def test_what_a_callback_asks_for_is_done_after_the_call() -> None:
    class Stops(Listens):
        max_updates_per_call = Listens.max_updates_per_call

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_train_batch_end(batch, logs)
            if batch == 12:
                self.model.stop_training = True

    seen = Stops()
    run(10, [seen])
    assert [event[:2] for event in seen.heard[-2:]] == [("begin", 19), ("end", 19)]


def test_others_are_called_once_a_call(calls: list[int]) -> None:
    """As under `steps_per_execution`: those that do not say that they can wait."""

    class Unaware(keras.callbacks.Callback):
        heard: list[tuple[Any, ...]] = []
        on_train_batch_begin = Listens.on_train_batch_begin
        on_train_batch_end = Listens.on_train_batch_end

    later, once = Listens(), Unaware()
    run(10, [later, once])
    assert [event[:2] for event in once.heard] == [
        (edge, batch)
        for first in (0, 10, 20)
        for edge, batch in (("begin", first), ("end", first + 9))
    ]
    assert once.heard[1::2] == later.heard[19::20]


def test_a_lambda_runs_at_every_batch(calls: list[int]) -> None:
    seen: list[int] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(batch)
    )
    run("auto", [watch])
    assert seen == list(range(30))
    assert not calls


def test_ragged_logs_are_of_single_steps(calls: list[int]) -> None:
    class Ragged(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": tf.reduce_sum(batch[0]), "rows": tf.RaggedTensor.from_tensor(batch[0])}

    def model() -> keras.Model:
        made = Ragged()
        made.compile("sgd", "mse", jit_compile=False)
        return made

    run("auto", model=model, logging__every="100ba")
    assert not calls
