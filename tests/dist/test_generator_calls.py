"""Several calls with one generator see the items that calls of Keras' own see."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.distributed import current_world

QUIET = {"logging": {"progress": "none", "csv": False}}
EPOCHS = {"steps_per_epoch": 1, "epochs": 3, "shuffle": False, "verbose": 0}
# The items that each pass is given, of the generator that is trained on and of the other. Keras
# loses what it has read ahead at the end of each pass, which is one item or, where reading is slow,
# more.
TRAINING = [0, 1, 2], [4, 5, 6], [8, 9]  # fit, fit, predict
VALIDATIONS = [0, 1, 2, 3], [0, 1, 5, 6], [0, 1, 8, 9]  # inside the first fit
EVALUATIONS = [11, 12], [14], [16], [18], [20]  # the last three inside the second fit
SEEN = [  # the loss of a batch is the number of its item
    TRAINING[0],
    [sum(items) / len(items) for items in VALIDATIONS],
    *([sum(items) / len(items)] for items in EVALUATIONS),
    *TRAINING[1:],
]


class Reading:
    """Reads of a generator whose items hold their number, without end."""

    def __init__(self, *passes: list[int]) -> None:
        self._given = itertools.chain.from_iterable(passes)
        self._read = 0

    def items(self) -> Iterator[Any]:
        while True:
            number, self._read = self._read, self._read + 1
            yield np.full((4, 1), number, "float32"), np.full((4, 1), number, "float32")

    def wait_for_next(self, *_: Any, **__: Any) -> None:
        """At the end of a step, wait until the item after that step's has been read ahead."""
        needed, deadline = next(self._given) + 2, time.monotonic() + 60
        while self._read < needed:
            assert time.monotonic() < deadline, f"{self._read} items were read, not {needed}"
            time.sleep(0.001)


def build() -> keras.Model:
    """A model whose outputs are twice its inputs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[2.0]])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


def seen(methods: Any, model: keras.Model, *, waits: bool = False) -> list[list[float]]:
    """The numbers of the items that each call is given."""
    training_reads, other_reads = Reading(*TRAINING), Reading(*VALIDATIONS, *EVALUATIONS)
    training, others, found = training_reads.items(), other_reads.items(), []
    slow = keras.callbacks.LambdaCallback()
    if waits:
        slow.on_train_batch_end = slow.on_predict_batch_end = training_reads.wait_for_next
        slow.on_test_batch_end = other_reads.wait_for_next

    def evaluate(steps: int) -> None:
        given = {"verbose": 0, "callbacks": [slow], "return_dict": True}
        found.append([methods.evaluate(model, others, steps=steps, **given)["loss"]])

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
def test_keras_sees_these_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorflow.data.AUTOTUNE", 1)  # a busy core makes it read further ahead
    assert seen(keras.Model, build(), waits=True) == SEEN


def two_fits(folder: Path, epochs: int) -> list[list[float]]:
    """The numbers that two fits train and validate on, the second for so many epochs."""
    training, others = Reading().items(), Reading().items()
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


class Drawn(keras.utils.PyDataset):
    """Six batches, each filled with a number of the global generator of NumPy; slow on rank 1."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.threads: set[threading.Thread] = set()
        self.drawn: list[float] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread())
        time.sleep(0.02 * current_world().rank)
        self.drawn.append(np.random.random())
        return (np.full((4, 1), self.drawn[-1], "float32"),) * 2

    def items(self) -> Iterator[Any]:
        return map(self.__getitem__, range(6))

    def as_kind(self, kind: str) -> Any:
        batch = tf.TensorSpec((4, 1))
        made = {
            "generator": lambda: self.items,
            "tf.data": lambda: tf.data.Dataset.from_generator(
                self.items, output_signature=(batch, batch)
            ),
        }
        return made.get(kind, lambda: self)()


def drawn(kind: str, backend: str, **options: Any) -> tuple[Any, list[float], bool]:
    """What is trained and validated on, the numbers drawn for it, and whether other threads do."""
    training, others = Drawn(**options), Drawn(**options)
    settings: dict[str, Any] = {**QUIET, "backend": backend}
    if backend == "local":
        settings["data"] = {"prefetch": 0}
    with Trainer(settings) as trainer:
        np.random.seed(0)
        look = keras.callbacks.LambdaCallback()
        look.on_train_batch_end = lambda *_, **__: np.random.random()
        given = {"validation_data": others.as_kind(kind), "epochs": 2, "shuffle": False}
        fit = trainer.fit(build(), training.as_kind(kind), callbacks=[look], **given)
    threads = (training.threads | others.threads) - {threading.current_thread()}
    return fit.history, training.drawn + others.drawn, bool(threads)


@pytest.mark.parametrize("kind", ["generator", "PyDataset", "tf.data"])
def test_batches_from_global_random_numbers(ranks: Callable[..., Any], kind: str) -> None:
    """Ranks draw the same, though one is slower, and a callback draws in between."""
    options = {"workers": 3} if kind == "PyDataset" else {}
    first, second = ranks(2).run(drawn, kind, "data_parallel", **options)
    assert first == second
    alone = drawn(kind, "local")
    assert first[2] == alone[2] == (kind == "tf.data")
    if kind == "generator":  # ranks look at the first batches of other data
        assert first == alone
