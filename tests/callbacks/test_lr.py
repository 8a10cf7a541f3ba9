"""The learning rate against closed formulas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktrainer import Callback, Trainer
from ktrainer.callbacks import LearningRate
from ktrainer.callbacks.lr_schedules import LrStage, scale_factor, warmup_factor
from ktrainer.errors import ConfigError
from tests.callbacks.helpers import (
    EachStep,
    Sized,
    data,
    everything,
    fit,
    rate_of,
    small_model,
)

STEPS = 5  # batches an epoch in `fit`


def goyal(target: float, step: int, size: int, warmup_epochs: float, steps: int = STEPS) -> float:
    """Goyal et al. 2017, as Horovod writes it; `target` is the rate already scaled."""
    epoch, batch = divmod(step, steps)
    if epoch + batch / steps >= warmup_epochs:
        return target
    return target / size * ((epoch + batch / steps) * (size - 1) / warmup_epochs + 1)


@pytest.mark.parametrize("size", [1, 2, 4, 7])
@pytest.mark.parametrize("scale", ["none", "linear", "sqrt"])
def test_the_factor_follows_the_formula(size: int, scale: str) -> None:
    rate = LearningRate(scale=scale, warmup="3ep", steps_per_epoch=STEPS, world=Sized(size))
    target = {"none": 1.0, "linear": size, "sqrt": size**0.5}[scale]
    for step in range(5 * STEPS):
        assert rate.factor(step) == pytest.approx(goyal(target, step, size, 3), rel=1e-14)


@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_every_step_of_a_fit_follows_the_formula(scale: str) -> None:
    target = 0.1 * (4 if scale == "linear" else 2)
    model, seen = small_model(), EachStep(rate_of)
    fit(model, [LearningRate(scale=scale, warmup="3ep", world=Sized(4)), seen], epochs=5)
    expected = [goyal(target, step, 4, 3) for step in range(5 * STEPS)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


@given(
    size=st.integers(1, 64),
    length=st.integers(1, 1000),
    position=st.floats(0, 2000, allow_nan=False),
)
def test_warmup_rises_from_one_over_size_to_one(size: int, length: int, position: float) -> None:
    factor = warmup_factor(position, length, size)
    assert 1 / size - 1e-12 <= factor <= 1 + 1e-12
    assert factor <= warmup_factor(position + 1, length, size) + 1e-12
    assert warmup_factor(0, length, size) == pytest.approx(1 / size)
    assert warmup_factor(length, length, size) == 1


def test_warmup_in_batches() -> None:
    model, seen = small_model(), EachStep(rate_of)
    fit(model, [LearningRate("linear", warmup="4ba", world=Sized(3)), seen], epochs=2)
    expected = [0.1 * (min(step / 4, 1) * 2 + 1) for step in range(10)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_schedule_object_is_multiplied_and_left_alone(tmp_path) -> None:
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    model = small_model(keras.optimizers.SGD(decay, momentum=0.9), run_eagerly=False)
    seen = EachStep(rate_of)
    fit(model, [LearningRate("linear", warmup="2ep", world=Sized(4)), seen], epochs=3)
    # Keras evaluates the schedule at `iterations`, which the step has raised by then.
    expected = [0.1 * 0.5 ** ((s + 1) / 10) * goyal(4.0, s, 4, 2) for s in range(15)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer._learning_rate.get_config() == decay.get_config()


def test_schedule_object_in_a_step_traced_before() -> None:
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.1, 0.01])
    twice = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.2, 0.02])
    scaled, plain = (small_model(keras.optimizers.SGD(decay), run_eagerly=False) for _ in range(2))
    for model in (scaled, plain):
        fit(model, [])  # traces the step
    fit(scaled, [LearningRate("linear", world=Sized(2))])
    plain.optimizer._learning_rate = twice
    plain.train_function = None
    fit(plain, [])
    for a, b in zip(scaled.weights, plain.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_a_second_fit_does_not_compound() -> None:
    model = small_model()
    first, second = EachStep(rate_of), EachStep(rate_of)
    fit(model, [LearningRate("linear", warmup="2ep", world=Sized(4)), first], epochs=3)
    fit(model, [LearningRate("linear", warmup="2ep", world=Sized(4)), second], epochs=3)
    assert first.seen == second.seen
    fit(model, [LearningRate(world=Sized(4))])
    assert rate_of(model) == pytest.approx(0.1)


@pytest.mark.exhaustive
def test_resume_is_stateless_in_the_step() -> None:
    """A new process, whose optimizer holds a scaled rate from elsewhere, goes on exactly."""
    settings = {"scale": "linear", "warmup": "3ep", "world": Sized(4)}
    whole, tail = EachStep(rate_of), EachStep(rate_of)
    fit(small_model(), [LearningRate(**settings), whole], epochs=5)

    first = LearningRate(**settings)
    interrupted = small_model()
    fit(interrupted, [first], epochs=2)

    class Restores(keras.callbacks.Callback):
        """Loads variables when training begins, as Keras' BackupAndRestore does."""

        def on_train_begin(self, logs=None):
            self.model.optimizer.build(self.model.trainable_variables)
            for ours, theirs in zip(
                self.model.optimizer.variables, interrupted.optimizer.variables, strict=True
            ):
                ours.assign(theirs)

    fit(small_model(), [LearningRate(**settings), Restores(), tail], epochs=5, initial_epoch=2)
    assert tail.seen == whole.seen[2 * STEPS :]


def test_state_dict_carries_the_base() -> None:
    settings = {"scale": "linear", "warmup": "3ep", "world": Sized(4)}
    first, model = LearningRate(**settings), small_model()
    fit(model, [first], epochs=2)
    state = first.state_dict()
    assert state["rates"][0]["base"] == pytest.approx(0.1)

    model.compile(keras.optimizers.SGD(rate_of(model), momentum=0.9), "mse")  # scaled already
    second, seen = LearningRate(**settings), EachStep(rate_of)

    class Restores(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            second.load_state_dict(state)

    fit(model, [second, Restores(), seen], epochs=4, initial_epoch=2)
    expected = [goyal(0.4, step, 4, 3) for step in range(2 * STEPS, 4 * STEPS)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


def test_others_change_the_base_by_the_same_ratio() -> None:
    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rate_of(self.model) / 2

    model, seen = small_model(), EachStep(rate_of)
    fit(model, [LearningRate("linear", warmup="2ep", world=Sized(4)), Halve(), seen], epochs=3)
    expected = [goyal(0.4, s, 4, 2) / 2 ** (s // STEPS) for s in range(3 * STEPS)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


TABLE = [0.1, 0.0, 0.05, 0.2]  # of rates, by epoch
SCHEDULED = {  # what a LearningRateScheduler returns, and the base rate of an epoch
    "absolute": (lambda epoch, rate: TABLE[epoch], lambda epoch: TABLE[epoch]),
    "relative": (lambda epoch, rate: rate / 2, lambda epoch: 0.1 / 2 ** (epoch + 1)),
    "constant": (lambda epoch, rate: 0.1, lambda epoch: 0.1),
}


@pytest.mark.parametrize("kind", SCHEDULED)
@pytest.mark.parametrize("warmup", [None, "2ep"])
def test_rates_that_are_set_at_the_begin_of_an_epoch_are_scaled(
    kind: str, warmup: str | None
) -> None:
    schedule, base = SCHEDULED[kind]
    model, seen = small_model(), EachStep(rate_of)
    scheduler = keras.callbacks.LearningRateScheduler(schedule)
    fit(model, [LearningRate("linear", warmup, world=Sized(4)), scheduler, seen], epochs=4)
    expected = [
        base(step // STEPS) * (4 if warmup is None else goyal(4.0, step, 4, 2))
        for step in range(4 * STEPS)
    ]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)
    assert rate_of(model) == pytest.approx(base(3), rel=1e-6)


def test_a_constant_rate_that_is_set_anew_leaves_the_momentum_alone() -> None:
    """A scheduler that returns the base rate changes nothing, to the bit."""
    scheduled, plain = small_model(), small_model()
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1)
    stages = [{"start": "2ba", "multiplier": 0.3}]
    fit(scheduled, [LearningRate(schedule=stages), scheduler], epochs=3)
    fit(plain, [LearningRate(schedule=stages)], epochs=3)
    for mine, other in zip(everything(scheduled), everything(plain), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.quick
@pytest.mark.parametrize(
    "change", [{"batch_size": 20}, {"batch_size": 10, "accumulate": 2}], ids=str
)
def test_after_a_resume_with_other_batches_phases_follow_the_epochs(tmp_path, change: Any) -> None:
    """Those in updates go on to count them."""
    stages = [
        {"start": "3ep", "multiplier": 0.1},
        {"start": "14ba", "end": "16ba", "multiplier": 0.5},
        {"start": "7ba", "end": "5ep", "multiplier": 3.0},
        {"start": "0ep", "multiplier": lambda epoch: 1 / (1 + epoch), "staircase": False},
    ]

    def train(epochs: int, batch_size: int, accumulate: int = 1) -> list[float]:
        seen = EachStep(rate_of)
        settings = {"run": {"dir": str(tmp_path)}, "checkpoint": {"every": "1ep"}}
        settings |= {"logging": {"progress": "none"}, "trainer": {"accumulate": accumulate}}
        with Trainer(settings, callbacks=[LearningRate(schedule=stages), seen]) as trainer:
            trainer.fit(small_model(), data(60), batch_size=batch_size, epochs=epochs)
        return seen.seen

    def rate(step: int, epoch: float) -> float:
        factor = (0.1 if epoch >= 3 else 1) * (0.5 if 14 <= step < 16 else 1)
        return 0.1 * factor * (3 if step >= 7 and epoch < 5 else 1) / (1 + epoch)

    expected = [rate(k, k / 6) for k in range(12)]
    np.testing.assert_allclose(train(2, 10), expected, rtol=1e-6)
    expected += [rate(12 + k, 2 + k / 3) for k in range(12)]
    np.testing.assert_allclose(train(6, **change), expected, rtol=1e-6)


def test_after_a_resume_with_other_batches_the_warmup_follows_the_epochs() -> None:
    for warmup, expected in (("4ep", goyal(1.0, 7, 2, 4, steps=3)), ("24ba", 0.5 + 13 / 48)):
        rate = LearningRate(warmup=warmup, world=Sized(2))
        rate.set_params({"steps": 3})
        rate.progress.epoch, rate.progress.batch, rate.progress.step = 2, 1, 13
        assert rate.factor(13) == pytest.approx(expected, rel=1e-14)


class SetsRate(keras.callbacks.Callback):
    """Gives the optimizer a rate of its own when training begins."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = 0.02


def test_a_rate_that_is_set_when_training_begins_is_the_base() -> None:
    model = small_model()
    for epochs in (1, 2):
        seen = EachStep(rate_of)
        fit(model, [LearningRate("linear", world=Sized(4)), SetsRate(), seen], epochs=epochs)
        np.testing.assert_allclose(seen.seen, [0.08] * epochs * STEPS, rtol=1e-6)
        assert rate_of(model) == pytest.approx(0.02)


PER_BATCH = {  # what a callback sets as a batch begins, and the base rate of an update
    "absolute": (lambda step, rate: 0.01 * (1 + step), lambda step: 0.01 * (1 + step)),
    "relative": (lambda step, rate: 0.9 * rate, lambda step: 0.1 * 0.9 ** (1 + step)),
}


@pytest.mark.parametrize("kind", PER_BATCH)
def test_rates_that_are_set_as_a_batch_begins_are_scaled(tmp_path, kind: str) -> None:
    change, base = PER_BATCH[kind]

    class Sets(keras.callbacks.Callback):
        step = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = change(self.step, rate_of(self.model))
            self.step += 1

    seen, factors = EachStep(rate_of), [4.0] * 3 + [2.0] * 7
    stages = [{"start": "0ba", "multiplier": 4.0}, {"start": "3ba", "multiplier": 0.5}]
    settings = {"run": {"dir": str(tmp_path)}, "logging": {"progress": "none"}}
    settings["lr"] = {"schedule": stages}
    with Trainer(settings, callbacks=[Sets(), seen]) as trainer:
        trainer.fit(small_model(), data(50), batch_size=10, epochs=2)
    expected = [factor * base(step) for step, factor in enumerate(factors)]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


def test_a_rate_that_was_lowered_before_there_was_a_schedule_stays_low(tmp_path) -> None:
    """As by ReduceLROnPlateau, in the part of a run that had no `lr.schedule`."""

    class Lower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.01

    def train(epochs: int, callback: Any, **more: Any) -> None:
        settings = {"run": {"dir": str(tmp_path)}, "checkpoint": {"every": "1ep"}, **more}
        settings["logging"] = {"progress": "none"}
        with Trainer(settings, callbacks=[callback]) as trainer:
            trainer.fit(small_model(), data(50), batch_size=10, epochs=epochs)

    seen = EachStep(rate_of)
    train(1, Lower())
    train(2, seen, lr={"schedule": [{"start": "7ba", "multiplier": 0.1}]})
    np.testing.assert_allclose(seen.seen, [0.01] * 2 + [0.001] * 3, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("rate_changes", [False, True])
def test_a_rate_that_keras_restores_is_not_the_base(tmp_path, rate_changes: bool) -> None:
    """Nor does the momentum, restored too, follow a change that is none."""

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rate_changes:
                self.model.optimizer.learning_rate = rate_of(self.model) / 2

    settings = {"scale": "linear", "warmup": "3ep", "world": Sized(4)}

    def train(epochs: int, *more: Any) -> tuple[Any, list[float]]:
        keras.utils.set_random_seed(0)
        model, seen = (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
            EachStep(rate_of),
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        fit(model, [LearningRate(**settings), Halve(), *more, seen], epochs=epochs)
        return model, seen.seen

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    whole, rates = train(5)
    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        train(5, keras.callbacks.BackupAndRestore(backup), Fails())
    rest, tail = train(5, keras.callbacks.BackupAndRestore(backup))
    assert tail == rates[2 * STEPS :]
    for mine, other in zip(everything(rest), everything(whole), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("parts", [None, 2])
def test_a_backup_of_keras_keeps_the_step_of_data_without_a_length(
    tmp_path, parts: int | None
) -> None:
    """Which the schedule, the rate that a callback has halved, and `trainer.max_steps` go by."""
    x, y = data(50)
    schedule = [{"start": "3ba", "end": "7ba", "multiplier": 0.2}]

    def batches() -> Any:
        yield from ((x[k : k + 10], y[k : k + 10]) for k in range(0, 50, 10))

    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = rate_of(self.model) / 2

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(name: str, *more: Any, **how: Any) -> tuple[Any, list[float]]:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=parts)
        model, seen = small_model(optimizer), EachStep(rate_of)
        model.layers[1].rate = 0.0
        settings = {"run": {"dir": str(tmp_path / name)}, "logging": {"progress": "none"}}
        settings |= {"lr": {"schedule": schedule}, "trainer": {"max_steps": 13}}
        with Trainer(settings, callbacks=[Halve(), *more, seen]) as trainer:
            trainer.fit(model, batches, epochs=5, **how)
        return model, seen.seen

    whole, rates = train("whole")
    assert len(rates) == 13
    backup = str(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        train("first", keras.callbacks.BackupAndRestore(backup), Fails())
    rest, tail = train("rest", keras.callbacks.BackupAndRestore(backup))
    np.testing.assert_allclose(tail, rates[STEPS:], rtol=1e-6)
    for mine, other in zip(everything(rest), everything(whole), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
    with pytest.warns(UserWarning, match="epoch 3, but lr.schedule and trainer.max_steps as at"):
        train("fresh", initial_epoch=2)


def test_after_a_fit_an_own_schedule_is_not_scaled() -> None:
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.1, 0.01])
    once, twice = (small_model(keras.optimizers.SGD(decay, momentum=0.9)) for _ in range(2))
    plain = small_model(keras.optimizers.SGD(0.1, momentum=0.9))
    for _ in range(2):  # as of a rate that is a number
        fit(twice, [LearningRate("linear", world=Sized(4))])
        fit(plain, [LearningRate("linear", world=Sized(4))])
    fit(once, [LearningRate("linear", world=Sized(4))])
    assert rate_of(once) == pytest.approx(0.1)
    for mine, other in zip(twice.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_an_optimizer_that_is_given_a_schedule_between_two_fits() -> None:
    model, seen = small_model(), EachStep(rate_of)
    fit(model, [LearningRate("linear", world=Sized(4))])
    decay = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.05, 0.01])
    model.optimizer.learning_rate = decay
    fit(model, [LearningRate("linear", world=Sized(4)), seen])
    np.testing.assert_allclose(seen.seen, [0.2] * STEPS, rtol=1e-6)


def test_stages_multiply_and_end() -> None:
    stages = [
        {"start": "1ep", "end": "3ep", "multiplier": 0.5},
        {"start": "2ep", "multiplier": 0.1},
        LrStage.of({"start": "0ba", "multiplier": lambda s: 1 - s / 100, "staircase": False}),
    ]
    model, seen = small_model(), EachStep(rate_of)
    fit(model, [LearningRate(schedule=stages), seen], epochs=4)
    expected = [
        0.1
        * (0.5 if STEPS <= s < 3 * STEPS else 1)
        * (0.1 if s >= 2 * STEPS else 1)
        * (1 - s / 100)
        for s in range(4 * STEPS)
    ]
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)


def test_staircase_gives_a_function_whole_epochs() -> None:
    seen = [LrStage.of({"start": "0ep", "multiplier": float}).factor(s, 4) for s in range(9)]
    assert seen == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    smooth = LrStage.of({"start": "0ep", "multiplier": float, "staircase": False})
    assert smooth.factor(3, 4) == 0.75


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction(nesterov: bool) -> None:
    """Against SGD written out, with v scaled by new/old when the rate changes (Goyal, eq. 9)."""
    rates = [0.1 * f for f in (1, 1, 0.5, 0.5, 0.1)]
    stages = [
        {"start": "2ba", "end": "4ba", "multiplier": 0.5},
        {"start": "4ba", "multiplier": 0.1},
    ]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
    model.compile(optimizer, "mse", run_eagerly=True)
    w = model.get_weights()[0].astype("float64")
    fit(model, [LearningRate(schedule=stages)])

    x, y = (array.astype("float64") for array in data())
    v, old = np.zeros_like(w), rates[0]
    for step, rate in enumerate(rates):
        rows = slice(step * 10, step * 10 + 10)
        gradient = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 10
        v = 0.9 * v * (rate / old) - rate * gradient
        w = w + (0.9 * v - rate * gradient if nesterov else v)
        old = rate
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-5)


def test_correction_can_be_left_out_and_needs_momentum() -> None:
    stages = [{"start": "2ba", "multiplier": 0.5}]
    corrected, left = small_model(), small_model()
    fit(corrected, [LearningRate(schedule=stages)])
    fit(left, [LearningRate(schedule=stages, momentum_correction=False)])
    assert not np.array_equal(corrected.get_weights()[0], left.get_weights()[0])
    adam = small_model(keras.optimizers.Adam(0.1))
    fit(adam, [LearningRate(schedule=stages)])


def test_inside_wrappers() -> None:
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    model, seen = small_model(keras.optimizers.LossScaleOptimizer(inner)), EachStep(rate_of)
    fit(model, [LearningRate("linear", world=Sized(2)), seen])
    np.testing.assert_allclose(seen.seen, [0.2] * STEPS, rtol=1e-6)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.14 has no MultiOptimizer"
)
@pytest.mark.parametrize("built", [True, False])
def test_optimizers_that_a_function_chooses(built: bool) -> None:
    """They are known once the MultiOptimizer is built: of an unbuilt model, by its Trainer."""
    kernels, others = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.MultiOptimizer(lambda v: kernels if "kernel" in v.path else others)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    if built:
        model.build((None, 4))
    model.compile(optimizer, "mse", run_eagerly=True)
    seen, rows = EachStep(lambda _: (float(kernels.learning_rate), float(others.learning_rate))), []

    class Rows(Callback):
        def on_log(self, step, logs):
            rows.append(logs["learning_rate"])

    words = ["lr.schedule=[{start: 2ba, multiplier: 0.5}]", "watch.learning_rate=true"]
    words += ["logging.every=1ba", "logging.progress=none", "data.batch_size=10"]
    with Trainer(overrides=words, callbacks=[seen, Rows()]) as trainer:
        trainer.fit(model, data())
    expected = [(0.1, 0.01)] * 2 + [(0.05, 0.005)] * 3
    np.testing.assert_allclose(seen.seen, expected, rtol=1e-6)
    np.testing.assert_allclose(rows, [kernel for kernel, _ in expected], rtol=1e-6)


def test_without_settings_the_rate_is_unchanged() -> None:
    model = small_model()
    fit(model, [LearningRate(world=Sized(4))])
    other = small_model()
    fit(other, [])
    for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_epochs_of_unknown_length_are_refused() -> None:
    def batches():
        for _ in range(3):
            yield np.zeros((2, 4), "float32"), np.zeros((2, 1), "float32")

    with pytest.raises(ConfigError, match="updates"):
        small_model().fit(
            batches(),
            verbose=0,
            shuffle=False,
            callbacks=[LearningRate(warmup="1ep", world=Sized(2))],
        )


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="linear"):
        LearningRate(scale="liner")
    with pytest.raises(ConfigError, match="time"):
        LearningRate(warmup="10m")
    with pytest.raises(ConfigError, match=r"lr\.schedule\.start"):
        LearningRate(schedule=[{"start": "5s", "multiplier": 1}])
    assert scale_factor("sqrt", 4) == 2
