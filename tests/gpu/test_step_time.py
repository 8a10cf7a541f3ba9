"""What a step costs on the device: Keras' `fit` and ktrainer's loop, in turns."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from ktrainer import Trainer
from ktrainer.steps import CompiledProgram
from tests.contracts.running import SEED, Outcome, assert_same, config, outcome_of
from tests.contracts.zoo_parts import labels, small_mlp
from tests.dist.harness import Ranks, keras_state
from tests.gpu.device import Device

pytestmark = pytest.mark.gpu

EPOCHS = 4  # the first compiles
# A loop that is slower than this is broken; a smaller difference needs more turns than there are.
SLOWEST = 1.5


def mlp(units: int = 64) -> keras.Model:
    hidden = layers.Dense(units, activation="relu")
    return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), hidden, layers.Dense(10)])


def cnn(units: int = 32) -> keras.Model:
    convs = [layers.Conv2D(k * units, 3, strides=2, activation="relu") for k in (1, 2)]
    return keras.Sequential([keras.Input((28, 28, 1)), *convs, layers.Flatten(), layers.Dense(10)])


def wide(units: int = 4096) -> keras.Model:
    """One that computes for most of a step."""
    hidden = [layers.Dense(units, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


# Model, batch, steps an epoch.
MODELS: dict[str, tuple[Callable[..., keras.Model], int, int]] = {
    "MLP 784-64-10, batch 64": (mlp, 64, 200),
    "CNN of 32 and 64 filters, batch 64": (cnn, 64, 200),
    "MLP 784-4096x4-10, batch 1024": (wide, 1024, 20),
}
OURS, FIT = "ktrainer", "Model.fit"
VARIANTS: dict[str, dict[str, Any]] = {
    FIT: {"jit_compile": False},
    OURS: {},
    f"{FIT}, XLA": {"jit_compile": True},  # Keras' default on a GPU
    f"{OURS}, XLA": {"xla": True},
    f"{OURS}, 1 update a call": {"steps_per_call": 1},
}


class EpochTimes(keras.callbacks.Callback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def fitted(build: Callable[[], keras.Model], batch: int, steps: int, name: str) -> list[float]:
    """Milliseconds of a step in each epoch but the first."""
    settings, times = dict(VARIANTS[name]), EpochTimes()
    keras_state.clear()
    keras.utils.set_random_seed(SEED)
    random = np.random.default_rng(0)
    x = random.random((batch * steps, 28, 28, 1), dtype=np.float32)
    y = random.integers(0, 10, len(x))
    model = build()
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=settings.pop("jit_compile", False),
    )
    if name.startswith(FIT):
        model.fit(x, y, batch, EPOCHS, verbose=0, shuffle=False, callbacks=[times])
    else:
        trainer = {"epochs": EPOCHS, **settings}
        with Trainer(config(trainer=trainer, data={"batch_size": batch})) as it:
            it.fit(model, x, y, callbacks=[times])
    return [seconds / steps * 1e3 for seconds in times.seconds[1:]]


def step_times(name: str, rounds: int, least: bool) -> dict[str, list[float]]:
    """Milliseconds a step of one of `MODELS`, by variant, which take turns.

    Args:
        least: train a small model for a short time, only to see that this runs.
    """
    build, batch, steps = MODELS[name]
    with Trainer(config()):  # takes the device before data are made
        pass
    if least:
        build, batch, steps = partial(build, 8), 16, 3
    times = defaultdict(list)
    for _ in range(rounds):
        for variant in VARIANTS:
            times[variant] += fitted(build, batch, steps, variant)
    return dict(times)


@pytest.mark.parametrize("name", MODELS)
def test_step_time_beside_keras_fit(
    on_device: Callable[..., Ranks], device: Device, seen: Callable[..., None], name: str
) -> None:
    rounds = 2 if device.is_gpu else 1
    (times,) = on_device().run(step_times, name, rounds, not device.is_gpu, deadline=300)
    median = {variant: statistics.median(values) for variant, values in times.items()}
    seen(**{f"{variant} (ms)": value for variant, value in median.items()})
    assert set(median) == set(VARIANTS)
    if device.is_gpu:
        assert median[OURS] <= SLOWEST * median[FIT]


class Calls(CompiledProgram):
    """Notes how many updates each call makes."""

    sizes: list[int]

    def train_many(self, batches: Any, *args: Any) -> Any:
        self.sizes.append(len(batches))
        return super().train_many(batches, *args)


def many_updates(updates: int | str) -> tuple[Outcome, list[int]]:
    """The outcome of 300 updates of a small model, and how many each call made that made several.

    Args:
        updates: in one call.
    """
    keras_state.clear()
    random, Calls.sizes = np.random.default_rng(0), []
    x = random.normal(size=(2400, 8)).astype(np.float32)
    trainer = {"epochs": 1, "steps_per_call": updates, "deterministic": True}
    with Trainer(config(trainer=trainer, data={"batch_size": 8}, seed=SEED)) as it:
        it.backend.prepare = Calls  # type: ignore[method-assign, assignment]
        history = it.fit(lambda: small_mlp(keras.optimizers.SGD(0.05)), (x, labels(2400)))
        return outcome_of(it.model, history), Calls.sizes


def test_auto_makes_several_updates_a_call_with_the_bits_of_single_ones(
    on_device: Callable[..., Ranks], seen: Callable[..., None]
) -> None:
    ((single, none),) = on_device().run(many_updates, 1, deadline=120)
    ((several, calls),) = on_device().run(many_updates, "auto", deadline=120)
    seen(updates_in_the_largest_call=max(calls, default=1))
    assert not none
    assert calls
    assert_same(several, single)
