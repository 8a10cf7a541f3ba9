"""`Trainer.fit` with the arguments of `Model.fit`: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.errors import ConfigError, DataError
from tests.contracts.running import Outcome, assert_same, outcome_of, use_float64

ROWS = 23
Make = Callable[[], dict[str, Any]]


@pytest.fixture(autouse=True)
def _float64() -> None:
    use_float64()


@pytest.fixture
def quiet(tmp_path: Any) -> dict[str, Any]:
    return {"run": {"dir": str(tmp_path)}, "logging": {"progress": "none", "csv": False}}


def arrays(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return x, x @ random.normal(size=(3, 2)) + 1


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    model.add(keras.layers.Dropout(0.2))
    model.add(keras.layers.Dense(2))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def two_by_two() -> keras.Model:
    inputs = [keras.Input((3,)), keras.Input((3,))]
    hidden = keras.layers.Add()([keras.layers.Dense(4)(part) for part in inputs])
    model = keras.Model(inputs, [keras.layers.Dense(2)(hidden), keras.layers.Dense(2)(hidden)])
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.3])
    return model


def keras_fit(make: Make, builder: Callable[[], keras.Model] = build, times: int = 1) -> Outcome:
    keras.utils.set_random_seed(1)
    model = builder()
    for _ in range(times):
        history = model.fit(**{"verbose": 0} | make())
    return outcome_of(model, history)


def trainer_fit(
    settings: dict[str, Any],
    make: Make,
    builder: Callable[[], keras.Model] = build,
    times: int = 1,
) -> Outcome:
    with Trainer(settings) as trainer:
        keras.utils.set_random_seed(1)
        model = builder()
        for _ in range(times):
            history = trainer.fit(model, **{"verbose": 0} | make())
        return outcome_of(model, history)


def xy(**more: Any) -> dict[str, Any]:
    x, y = arrays()
    return {"x": x, "y": y, "epochs": 3, **more}


CASES: dict[str, Make] = {
    "shuffled": lambda: xy(batch_size=5),
    "defaults": lambda: xy(),
    "shuffled within batches": lambda: xy(batch_size=5, shuffle="batch"),
    "in order": lambda: xy(batch_size=5, shuffle=False),
    "validation data": lambda: xy(batch_size=5, validation_data=arrays(9, 1)),
    "validation batches": lambda: xy(
        batch_size=5, validation_data=arrays(9, 1), validation_batch_size=2, validation_steps=3
    ),
    "validation steps alone": lambda: xy(validation_data=arrays(9, 1), validation_steps=2),
    "validation split": lambda: xy(batch_size=5, validation_split=0.3),
    "validation of some epochs": lambda: xy(
        batch_size=5, epochs=5, validation_split=0.3, validation_freq=[1, 4]
    ),
    "validation every 2 epochs": lambda: xy(
        batch_size=5, epochs=5, validation_split=0.3, validation_freq=2
    ),
    "sample weights": lambda: xy(batch_size=5, sample_weight=np.linspace(0.0, 2.0, ROWS)),
    "weights and split": lambda: xy(
        batch_size=5, sample_weight=np.linspace(0.5, 2.0, ROWS), validation_split=0.3
    ),
    "initial epoch": lambda: xy(batch_size=5, initial_epoch=2, epochs=5),
    "no epochs left": lambda: xy(batch_size=5, initial_epoch=3, epochs=3),
    "tf tensors": lambda: {
        "x": tf.constant(arrays()[0]), "y": tf.constant(arrays()[1]), "batch_size": 5, "epochs": 2
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("times", [1, 2])
def test_arrays(name: str, times: int, quiet: dict[str, Any]) -> None:
    theirs = keras_fit(CASES[name], times=times)
    assert_same(trainer_fit(quiet, CASES[name], times=times), theirs)


STEPS: dict[str, Make] = {
    "fewer than batches": lambda: xy(batch_size=5, steps_per_epoch=2, epochs=7),
    "dividing": lambda: xy(batch_size=6, steps_per_epoch=2, epochs=5),
    "more than batches": lambda: xy(batch_size=5, steps_per_epoch=9),
    "of no size": lambda: xy(steps_per_epoch=4),
    "dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=2).batch(5),
        "epochs": 7,
        "steps_per_epoch": 2,
    },
    "repeated dataset": lambda: {
        "x": tf.data.Dataset.from_tensor_slices(arrays()).repeat().shuffle(ROWS, seed=2).batch(5),
        "epochs": 3,
        "steps_per_epoch": 2,
    },
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("name", STEPS)
def test_steps_per_epoch(name: str, quiet: dict[str, Any]) -> None:
    assert_same(trainer_fit(quiet, STEPS[name]), keras_fit(STEPS[name]))


def test_several_inputs_and_outputs(quiet: dict[str, Any]) -> None:
    x, y = arrays()
    weights = [np.linspace(0.0, 1.0, ROWS), np.linspace(1.0, 0.0, ROWS)]

    def make() -> dict[str, Any]:
        return {"x": [x, x + 1], "y": [y, y - 1], "sample_weight": weights, "batch_size": 5}

    assert_same(trainer_fit(quiet, make, two_by_two), keras_fit(make, two_by_two))
