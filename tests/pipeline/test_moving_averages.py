"""Averages of weights and Keras' checkpoints under a pipeline: those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks, layers

from ktrainer import Trainer
from ktrainer.steps.variable_placement import placement_of
from tests.pipeline.equal import configure, pipeline

ROWS, BATCH, EPOCHS = 43, 8, 3  # the last of six batches has three rows


def build(optimizer: str) -> keras.Model:
    """Of two outputs one has no loss: the weights of the last of three stages have no gradients."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = layers.Dense(8, "tanh", name="first")(inputs)
    x = layers.Dense(8, "tanh", name="second")(x)
    outputs = {"main": layers.Dense(3, name="main")(x), "aside": layers.Dense(2, name="aside")(x)}
    averaging = {"use_ema": True, "ema_momentum": 0.7}
    made = {
        "adam": lambda: keras.optimizers.Adam(0.02, **averaging),
        "overwriting": lambda: keras.optimizers.SGD(
            0.1, momentum=0.9, ema_overwrite_frequency=4, global_clipnorm=0.5, **averaging
        ),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1, **averaging), initial_scale=64.0
        ),
    }[optimizer]()
    model = keras.Model(inputs, outputs)
    model.compile(made, {"main": "mse"})
    return model


def dataset() -> tf.data.Dataset:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 6)), random.normal(size=(ROWS, 3))
    return tf.data.Dataset.from_tensor_slices((x, {"main": y})).batch(BATCH)


def watching(folder: str, swap_on_epoch: bool) -> list[Any]:
    to = Path(folder)
    return [
        callbacks.SwapEMAWeights(swap_on_epoch),
        callbacks.ModelCheckpoint(to / "{epoch}.keras"),
        callbacks.ModelCheckpoint(to / "best.weights.h5", "val_loss", 0, True, True),
        callbacks.ModelCheckpoint(
            to / "{epoch}-{batch}.weights.h5", "loss", 0, False, True, "auto", 4
        ),
    ]


def weights_of(model: keras.Model) -> dict[str, np.ndarray]:
    """By place and name, the values that are here, of weights and of what the optimizer keeps."""
    placement = placement_of(model)
    variables = enumerate([*model.variables, *model.optimizer.variables])
    return {
        f"{i}:{v.name}": v.numpy() for i, v in variables if placement is None or placement.holds(v)
    }


def train(words: tuple[str, ...], optimizer: str, folder: str, swap_on_epoch: bool) -> Any:
    """Weights and history, of `Model.fit` if there are no words; and a last evaluation."""
    configure("float64")
    given = {"validation_data": dataset(), "epochs": EPOCHS}
    given["callbacks"] = watching(folder, swap_on_epoch)
    if not words:
        model = build(optimizer)
        history = model.fit(dataset(), **given, shuffle=False, verbose=0)
        swap = callbacks.SwapEMAWeights()
        logs = model.evaluate(dataset(), callbacks=[swap], verbose=0, return_dict=True)
        return weights_of(model), history.history, logs
    quiet = ("logging.progress=none", "logging.csv=false", "world.deadline=60")
    with Trainer(overrides=[*words, *quiet]) as trainer:
        history = trainer.fit(lambda: build(optimizer), dataset(), **given)
        logs = trainer.evaluate(trainer.model, dataset(), callbacks=[callbacks.SwapEMAWeights()])
        return weights_of(trainer.model), history.history, logs


def same_files(ours: Path, theirs: Path, optimizer: str) -> None:
    """The same names; and what Keras alone loads of each file is the same."""
    names = sorted(path.name for path in theirs.iterdir())
    assert names == sorted(path.name for path in ours.iterdir())
    assert len(names) > EPOCHS + 1
    for name in names:
        found = []
        for folder in (ours, theirs):
            if name.endswith(".keras"):
                model = keras.models.load_model(folder / name)
            else:
                model = build(optimizer)
                model.optimizer.build(model.trainable_variables)
                model.load_weights(folder / name)
            found.append(weights_of(model))
        assert found[0].keys() == found[1].keys()
        for key, value in found[1].items():
            np.testing.assert_allclose(found[0][key], value, 1e-11, 1e-13, err_msg=f"{name} {key}")


STAGES = "backend.stages={0: first, 1: 'second|main', 2: aside}"
TWO = ("backend.costs=uniform",)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    ("optimizer", "partitions", "size", "swap_on_epoch", "words"),
    [
        ("adam", 2, 4, False, TWO),
        ("overwriting", 3, 3, True, (STAGES,)),
        ("scaled", 3, 3, False, (STAGES,)),
    ],
)
def test_as_model_fit(
    ranks: Callable[..., Any],
    tmp_path: Path,
    optimizer: str,
    partitions: int,
    size: int,
    swap_on_epoch: bool,
    words: tuple[str, ...],
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    expected, history, evaluated = train((), optimizer, str(alone), swap_on_epoch)
    words = (*pipeline(partitions, "backend.microbatches=2"), *words)
    ours = ranks(size).run(train, words, optimizer, str(together), swap_on_epoch, deadline=150)
    assert set().union(*(held for held, _, _ in ours)) == set(expected)
    for held, logged, logs in ours:
        for name, value in held.items():
            np.testing.assert_allclose(value, expected[name], 1e-11, 1e-13, err_msg=name)
        for key, values in history.items():
            np.testing.assert_allclose(logged[key], values, 1e-11, err_msg=key)
        for key, number in evaluated.items():
            np.testing.assert_allclose(logs[key], number, 1e-11, err_msg=key)
    same_files(together, alone, optimizer)
    moved = [k for k in expected if "average" in k]
    assert moved
