"""Trainings in which ranks die; `test_healing.py` launches it, and compares with one process.

    ktrainer run --heal -n 4 healing_script.py RESULTS mixed,0:7:in,1:9:before words,2:9:after

Each word is one `fit`: its training, then who dies (by its number for life), at which step, where.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from ktrainer import Callback, Trainer
from ktrainer.distributed.listening_sockets import on_all_interfaces
from ktrainer.steps.named_variables import attribute_variables

SETTINGS = {
    "mixed": [
        *("checkpoint.every=2ba", "trainer.validate_every=3ba"),
        *("trainer.accumulate=2", "trainer.clip.global_norm=0.5"),
    ],
    "words": ["trainer.steps_per_call=3", "logging.batch_logs=all"],
    "longer": [
        *("checkpoint.every=1ep", "logging.batch_logs=all", "health.spike=1.05"),
        *("health.on_spike=skip", "health.spike_window=2", "health.max_skips=100"),
    ],
    # The momentum follows the rate, once.
    "falling": ["lr.schedule=[{start: 1ep, multiplier: 0.1}]"],
}
EPOCHS = {"longer": 24}
REFUSED = 3  # processes that cannot join, after which no more are started


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6))
    y = (x @ random.normal(size=(6, 3))).argmax(-1)
    if "CHANGES" in os.environ and "KTRAINER_STABLE_RANK" in os.environ:
        x[7] += 1  # a file that somebody has edited meanwhile
    return (random.integers(0, 30, (200, 5)), y) if name == "words" else (x, y)


def build(name: str) -> keras.Model:
    """Plain; with statistics and seeds that a step changes before it may fail; with gradients of
    embeddings, as slices."""
    keras.utils.set_random_seed(3)
    inner: dict[str, list[Any]] = {
        "mixed": [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.BatchNormalization(synchronized=True),
        ],
        "words": [keras.Input((5,)), layers.Embedding(30, 4), layers.Flatten()],
    }
    first = inner.get(name, [keras.Input((6,)), layers.Dense(8, "tanh")])
    model = keras.Sequential([*first, Counts(), layers.Dense(3)])
    model.compile(
        keras.optimizers.Adam(0.01)
        if name in ("mixed", "longer")
        else keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


class Counts(layers.Layer):
    """The identity; counts updates in a variable that Keras does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.n = tf.Variable(0)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.n.assign_add(1)
        return x


def lowering() -> list[keras.callbacks.Callback]:
    """Lower the rate at every epoch's begin and every other one's end: twice for one would show."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.95 * rate),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.7, patience=2, min_delta=100.0),
    ]


class Dies(Callback):
    """Ends this process, or stops it, in the middle of things.

    Args:
        slot, step, where: who, when, and where; `in` is with an all-reduce under way.
    """

    def __init__(self, slot: int, step: int, where: str) -> None:
        super().__init__()
        self.slot, self.step, self.where = slot, step, where

    def at(self, where: str) -> None:
        mine = where == self.where.removesuffix("!") and self.world.stable_rank == self.slot
        if mine and self.progress.step >= self.step:
            os.kill(os.getpid(), signal.SIGSTOP if self.where.endswith("!") else signal.SIGKILL)

    def before_update(self) -> None:
        """Not an event: with one, all weights would be kept during the update."""
        self.at("before")
        healed = self.trainer.state.healed
        if self.where == "joined" and not (self.joined() or len(healed) > REFUSED):
            time.sleep(0.5)  # so that new ranks find ranks to join

    def on_step_end(self, step: int, logs: Any = None) -> None:
        self.at("after")

    def on_test_begin(self, logs: Any = None) -> None:
        self.at("validation")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.at("epoch")
        if self.joined():
            self.at("joined")

    def joined(self) -> bool:
        """Whether a rank has joined."""
        return any(healed.joined for healed in self.trainer.state.healed)


def die_in_updates(deaths: list[Dies]) -> Callable[[], None]:
    """Let `deaths` happen before updates, and when an all-reduce of gradients has been started."""
    from ktrainer.distributed.elastic_world import ElasticWorld
    from ktrainer.elastic import ElasticRecovery

    original, begin = ElasticWorld.wait, ElasticRecovery.begin_step

    def begin_step(self: Any) -> None:
        for dies in deaths:
            dies.before_update()
        begin(self)

    def wait(self: Any, request: Any, what: str, *buffers: Any) -> None:
        if "gradients" in what:
            for dies in deaths:
                dies.at("in")
        original(self, request, what, *buffers)

    ElasticWorld.wait = wait  # type: ignore[method-assign]
    ElasticRecovery.begin_step = begin_step  # type: ignore[method-assign]

    def put_back() -> None:
        ElasticWorld.wait = original  # type: ignore[method-assign]
        ElasticRecovery.begin_step = begin  # type: ignore[method-assign]

    return put_back


def train(name: str, words: list[str], callbacks: list[Any]) -> tuple[dict[str, Any], Trainer]:
    """One `fit`: what must be the same whoever dies, and its trainer."""
    keras.utils.clear_session()
    words = [
        "data.batch_size=25",
        f"trainer.epochs={EPOCHS.get(name, 4)}",
        "logging.progress=none",
        *SETTINGS[name],
        *words,
    ]
    if name == "falling":
        folder = dict(word.split("=", 1) for word in words)["run.dir"]
        callbacks = [*callbacks, keras.callbacks.CSVLogger(f"{folder}/keras.csv")]
    x, y = data(name)
    given: dict[str, Any] = {"x": (x, y)}
    if name == "longer":  # of unknown length, and read in passes that epochs cut
        batches = [(x[i : i + 25], y[i : i + 25]) for i in range(0, len(x), 25)]
        given = {"x": lambda: iter(batches), "steps_per_epoch": 5}
    with Trainer(overrides=words, callbacks=[*lowering(), *callbacks]) as trainer:
        model = functools.partial(build, name)
        with warnings.catch_warnings(record=True) as said:
            warnings.filterwarnings("always", ".*the update was skipped")
            history = trainer.fit(model, **given, validation_data=(x[:40], y[:40])).history
        weights = [np.asarray(v.numpy()) for v in trainer.model.weights]
        slots = [np.asarray(v.numpy()) for v in trainer.model.optimizer.variables]
        counts = [np.asarray(v.numpy()) for _, v in attribute_variables(trainer.model)]
    skipped = [each for each in said if "the update was skipped" in str(each.message)]
    for each in said:
        if each not in skipped:
            warnings.warn(each.message, each.category, stacklevel=2)
    found = {"history": history, "weights": weights + slots + counts, "skipped": len(skipped)}
    return found, trainer


def main() -> None:
    if "NEVER_JOINS" in os.environ and "KTRAINER_STABLE_RANK" in os.environ:
        time.sleep(1000)  # as MPI may, that waits for a rank which is gone
    keras.config.set_floatx("float64")
    results, *faults = sys.argv[1:]
    more = os.environ.get("WORDS", "").split()
    for number, fault in enumerate(faults):
        name, *who = fault.split(",")
        parts = [each.split(":") for each in who]
        deaths = [Dies(int(slot), int(step), where) for slot, step, where in parts]
        put_back = die_in_updates(deaths)
        run = f"run.dir={results}/run-{number}"
        found, trainer = train(name, ["backend=data_parallel", run, *more], deaths)
        put_back()
        everywhere = trainer.world.any(bool(on_all_interfaces()))
        if trainer.world.rank == 0:
            folder = Path(results)
            arrays = {str(k): v for k, v in enumerate(found["weights"])}
            np.savez(folder / f"{number}.npz", **arrays)
            # What became of the ranks in this `fit`.
            healed = [[h.step, list(h.lost), h.size, h.seconds] for h in trainer.state.healed]
            facts = {
                "history": found["history"],
                "healed": healed,
                "stable_rank": trainer.world.stable_rank,
            }
            facts["listens everywhere"] = everywhere
            (folder / f"{number}.json").write_text(json.dumps(facts))
        trainer.world.barrier("results")


if __name__ == "__main__":
    main()
