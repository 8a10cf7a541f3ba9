"""Several calls with one generator see the items that calls of Keras' own see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer

QUIET = {"logging": {"progress": "none", "csv": False}}
EPOCHS = {"steps_per_epoch": 1, "epochs": 3, "shuffle": False, "verbose": 0}
# The loss of a batch is the number of its item. Keras loses what it has read ahead, which is one
# item at the end of each pass unless reading is slower than the steps.
SEEN = [
    [0, 1, 2],  # fit
    [(0 + 1 + 2 + 3) / 4, (0 + 1 + 5 + 6) / 4, (0 + 1 + 8 + 9) / 4],  # its validation
    [(11 + 12) / 2],  # evaluate
    [14],
    [16],  # inside the second fit
    [18],
    [20],
    [4, 5, 6],  # that fit
    [8, 9],  # predict
]


def numbered() -> Iterator[Any]:
    for number in itertools.count():
        yield np.full((4, 1), number, "float32"), np.full((4, 1), number, "float32")


def build() -> keras.Model:
    """A model whose outputs are twice its inputs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[2.0]])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


def seen(methods: Any, model: keras.Model, pause: float = 0.0) -> list[list[float]]:
    """The numbers of the items that each call is given."""
    training, others, found = numbered(), numbered(), []

    def wait(*_: Any, **__: Any) -> None:
        time.sleep(pause)

    def evaluate(steps: int) -> None:
        given = {"verbose": 0, "callbacks": [slow], "return_dict": True}
        found.append([methods.evaluate(model, others, steps=steps, **given)["loss"]])

    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=wait)
    slow.on_test_batch_begin = slow.on_predict_batch_begin = wait
    given = {**EPOCHS, "callbacks": [slow], "validation_steps": 4}
    fit = methods.fit(model, training, **given, validation_data=others)
    found += [fit.history["loss"], fit.history["val_loss"]]
    evaluate(2)
    evaluate(1)
    model.compile(keras.optimizers.SGD(0.0), "mae")
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: evaluate(1))
    fit = methods.fit(model, training, **EPOCHS, callbacks=[look, slow])
    outputs = methods.predict(model, training, steps=2, verbose=0, callbacks=[slow])
    return [*found, fit.history["loss"], (outputs[::4, 0] / 2).tolist()]


def seen_by_trainer(backend: str) -> list[list[float]]:
    with Trainer({**QUIET, "backend": backend}) as trainer:
        return seen(trainer, build())


def test_calls_with_one_generator_see_the_items_of_keras(ranks: Callable[..., Any]) -> None:
    assert seen_by_trainer("local") == SEEN
    assert ranks(2).run(seen_by_trainer, "data_parallel") == [SEEN] * 2


@pytest.mark.exhaustive
def test_keras_sees_these_items() -> None:
    assert seen(keras.Model, build(), pause=0.05) == SEEN


def two_fits(folder: Path, epochs: int) -> list[list[float]]:
    """The numbers that two fits train and validate on, the second for so many epochs."""
    training, others = numbered(), numbered()
    settings = {**QUIET, "run": {"dir": str(folder)}, "checkpoint": {"every": "1ep"}}
    given = {"validation_data": others, "validation_steps": 4}
    with Trainer(settings) as trainer:
        model = build()
        first = trainer.fit(model, training, **EPOCHS, **given).history
        second = trainer.fit(model, training, **EPOCHS | {"epochs": epochs}, **given).history
        return [fit[name] for fit in (first, second) for name in ("loss", "val_loss")]


def test_a_resumed_script_passes_over_what_was_read(tmp_path: Path) -> None:
    expected = two_fits(tmp_path / "whole", 3)
    two_fits(tmp_path / "parts", 2)
    assert two_fits(tmp_path / "parts", 3) == expected
