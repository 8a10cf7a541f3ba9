"""A loop with everything that has a state, which `test_steps.py` runs, kills and compares.

    python steps_script.py RESULT FAULT words...

FAULT is `none`, `step:K` (killed in the body of update K, counted from 0), or `save:K` (killed
while the checkpoint of step K is written); on several ranks, rank 1 is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer import Trainer

ROWS, BATCH = 33, 8  # the last batch of an epoch has one row
KEYS = {"trainer": {"epochs": 3}, "logging": {"progress": "none", "csv": False}}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 8))
    return x, (x @ random.normal(size=(8, 3))).argmax(-1)


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=5).batch(BATCH)


class Loop:
    """A model with two optimizers, a metric, variables and plain values, and its step.

    Args:
        trainer: makes and runs it.
        dropout: rate; what is dropped differs between numbers of ranks.
    """

    def __init__(self, trainer: Trainer, dropout: float = 0.0) -> None:
        self.trainer = trainer
        with trainer.scope():
            inner = [keras.layers.Dense(6, "tanh"), keras.layers.Dropout(dropout, seed=2)]
            self.body = keras.Sequential([keras.Input((8,)), *inner])
            self.head = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            self.optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, 0.9)]
            for optimizer, model in zip(self.optimizers, [self.body, self.head], strict=True):
                optimizer.build(model.trainable_variables)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy()
            self.seen = tf.Variable(0, dtype=tf.int64)
        self.random = np.random.default_rng(1)
        self.state = {
            "accuracy": self.accuracy,
            "seen": [self.seen],
            "random": self.random,
            "drawn": [],
            "best": {"loss": float("inf")},
            "count": 0,
        }
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(self, x: Any, y: Any) -> Any:
        self.replicas = tf.distribute.get_strategy().num_replicas_in_sync  # as it is traced
        with tf.GradientTape(persistent=True) as tape:
            logits = self.head(self.body(x, training=True))
            loss = tf.reduce_sum(self.loss_of(y, logits)) / BATCH
        for optimizer, model in zip(self.optimizers, [self.body, self.head], strict=True):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.accuracy.update_state(y, logits)
        return loss

    def train(self, data: Any = batches, at: Callable[[int], Any] = lambda step: None) -> Any:
        """Train to the end.

        Args:
            at: called in each body with its step; what it returns ends the loop if it is true.
        """
        steps = self.trainer.steps(
            data,
            model={"body": self.body, "head": self.head},
            optimizer=self.optimizers,
            state=self.state,
        )
        with steps:
            for batch in steps:
                if steps.epoch_begins:
                    self.accuracy.reset_state()
                loss = float(self.trainer.reduce("sum", self.trainer.run(self.step, *batch)))
                if at(steps.step):
                    break
                self.seen.assign_add(1)
                if not np.isnan(loss):  # a step that is repeated
                    self.state["drawn"].append(self.random.integers(100).item())
                self.state["count"] += 1
                self.state["best"]["loss"] = min(loss, self.state["best"]["loss"])
                steps.log(loss=loss, accuracy=float(self.accuracy.result()))
        return self.result(steps)

    def result(self, steps: Any) -> dict[str, Any]:
        owners = [self.body, self.head, *self.optimizers, self.accuracy]
        every = [*(v for owner in owners for v in owner.variables), self.seen]
        plain = {key: self.state[key] for key in ("drawn", "best", "count")}
        return {
            "values": [np.asarray(v.numpy(), np.float64).ravel().tolist() for v in every],
            "plain": plain,
            "next": self.random.integers(100).item(),
            "history": steps.history,
            "replicas": self.replicas,
        }


def kills(trainer: Trainer, fault: str) -> Callable[[int], None]:
    """Kill this process as `fault` says, if it is the one."""
    what, _, when = fault.partition(":")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if what == "save":
        import ktrainer.checkpoint.format.checkpoint_folder as form

        def point(at: str, path: Path) -> None:
            if at == "before rename" and f"{int(when):08d}" in str(path):
                die()

        form.fault_point = point
    victim = min(1, trainer.world.size - 1)

    def at(step: int) -> None:
        if what == "step" and step == int(when) and trainer.world.stable_rank == victim:
            die()

    return at


def main() -> None:
    result, fault, *words = sys.argv[1:]
    keras.config.set_floatx("float64")
    trainer = Trainer.from_cli(argv=words, defaults=KEYS)
    dropout = 0.0 if trainer.world.heals else 0.2
    found = Loop(trainer, dropout).train(at=kills(trainer, fault))
    healed = [[h.step, list(h.lost), h.size] for h in trainer.state.healed]
    if trainer.world.is_root:
        Path(result).write_text(json.dumps(found | {"healed": healed}))


if __name__ == "__main__":
    main()
