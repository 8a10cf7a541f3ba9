"""Trainings whose data or steps have a state of their own, with the check before step 1 or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ktrainer
from ktrainer import Trainer
from tests.contracts import running
from tests.contracts.zoo_parts import floats
from tests.dist.harness import keras_state
from tests.verify import models

STEPS = 6


def from_numpy() -> Iterator[Any]:
    """Draws from NumPy's own generator, in the thread that makes batches."""
    np.random.seed(3)
    while True:
        time.sleep(0.05)
        x = np.random.rand(models.ROWS, 8)
        yield x, x[:, :5]


class FromKeras(keras.utils.PyDataset):
    """Draws from a generator of Keras', which is a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05)
        x = np.asarray(keras.random.normal((models.ROWS, 8), seed=self.seeds))
        return x, x[:, :5]


class Box:
    """A plain object that counts."""

    count = 0


class Keeping(keras.Model):
    """Keeps what it has seen in containers, objects, and variables inside of them."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.state = {"n": tf.Variable(0.0), "calls": 0}
        self.box, self.array = Box(), np.zeros(2)
        self.box.count = 0
        self.seen: list[int] = []

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        self.state["n"].assign_add(1.0)
        self.state["calls"] += 1
        self.box.count += 1
        self.array += 1
        self.seen.append(1)
        return keras.ops.mean(keras.ops.square(y_pred - y))

    def kept(self) -> list[float]:
        n, calls = float(self.state["n"]), self.state["calls"]
        return [n, calls, self.box.count, *self.array, len(self.seen)]


class Counting(Keeping):
    """Counts in a weight: replicas may not assign to a plain `tf.Variable`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.state["n"] = self.add_weight((), "zeros", trainable=False)


class Meeting(keras.Model):
    """Waits for the other ranks in its step."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        ktrainer.barrier()
        return keras.ops.mean(keras.ops.square(y_pred - y))


def arrays() -> Any:
    rows = STEPS * models.ROWS
    return floats(rows, 8), floats(rows, 5, seed=1)


CASES: dict[str, tuple[type, Callable[[], Any]]] = {
    "numpy": (keras.Model, from_numpy),
    "keras": (keras.Model, FromKeras),
    "keeping": (Keeping, arrays),
    "counting": (Counting, arrays),
    "meeting": (Meeting, arrays),
}


@running.unhurried()
def trained(case: str, verify: str, **backend: Any) -> list[Any]:
    """Losses, weights and what the model keeps, of a training with `health.verify` or without."""
    keras_state.clear()
    running.use_float64()
    keras.utils.set_random_seed(7)
    kind, make_data = CASES[case]
    model = models.net(kind)
    model.compile("sgd", None if kind is not keras.Model else "mse")
    given = models.config(**backend)
    given["trainer"] |= {"limit_train_batches": STEPS}
    with Trainer({**given, "health": {"verify": verify}}) as trainer:
        history = trainer.fit(model, make_data()).history
    kept = model.kept() if isinstance(model, Keeping) else []
    return [history["loss"], [v.numpy() for v in model.trainable_variables], kept]


def both(names: list[str], **backend: Any) -> dict[str, list[Any]]:
    """Each training with the check, and without."""
    return {
        case: [trained(case, verify, **backend) for verify in ("auto", "off")] for case in names
    }
