"""What a step costs on one process: Keras' `Model.fit` and ktrainer's loop, on small models.

    python benchmarks/keras_fit.py

A tiny MLP (784-64-10) and a small convolutional network, batches of 64 from a tf.data pipeline in
memory (for the MLP also from arrays), SGD with momentum, one thread for one operation. Where steps
are as short as these, the time goes into the loop around them. Keras' `steps_per_execution` and our
`trainer.steps_per_call` put several steps into one compiled call; `auto`, our default, chooses how
many, and is compared with Keras' default.
Its bound is a loop by hand of 50 steps a call, on batches that lie in memory.
Variants take turns, so that ratios hold on a noisy machine; shown is the median epoch of each but
every first one, in milliseconds a step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras_fit_table import BATCH, arguments, what_and_sizes
from results import OURS, record

from ktrainer.distributed import SingleWorld
from ktrainer.runtime.devices import claim_device

CALL = 50  # steps of the bound
PEER, BOUND = "Model.fit", f"{CALL} steps a call, batches in memory"


def mlp() -> keras.Model:
    hidden = layers.Dense(64, activation="relu")
    return keras.Sequential([keras.Input((28, 28, 1)), layers.Flatten(), hidden, layers.Dense(10)])


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


class EpochTimes(keras.callbacks.Callback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def compiled(build: Callable[[], keras.Model], steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        loss,
        metrics=["accuracy"],
        steps_per_execution=steps,
        jit_compile=False,
    )
    return model


def keras_fit(build: Callable[[], keras.Model], data: Any, epochs: int, steps: int) -> list[float]:
    times = EpochTimes()
    parts, batch_size = (data, BATCH) if isinstance(data, tuple) else ((data,), None)
    compiled(build, steps).fit(
        *parts, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[times]
    )
    return times.seconds


def ours(build: Callable[[], keras.Model], data: Any, epochs: int, steps: int | str) -> list[float]:
    times = EpochTimes()
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "trainer": {"epochs": epochs, "steps_per_call": steps},
            "data": {"batch_size": BATCH, "shuffle": False},  # for arrays
            "logging": {"progress": "none"},
            "world": {"threads": 1},
            "run": {"dir": folder},
        }
        with Trainer(config) as trainer:
            trainer.fit(compiled(build), data, callbacks=[times])
    return times.seconds


def by_hand(build: Callable[[], keras.Model], data: Any, epochs: int, steps: int) -> list[float]:
    """Seconds of as many steps as `data` has batches, without reading it meanwhile."""
    model, steps = compiled(build), min(steps, len(data))
    model.build((None, 28, 28, 1))
    model.optimizer.build(model.trainable_variables)
    # Their number of rows is unknown, as it is to Keras.
    spec = [tf.TensorSpec([None, *s.shape], s.dtype) for s in data.element_spec]

    @tf.function(autograph=False, input_signature=spec)
    def many(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        def step(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, model.train_step((x[i], y[i]))["loss"]

        start = tf.constant(0), tf.constant(0.0)
        return tf.while_loop(lambda i, _: i < steps, step, start, parallel_iterations=1)[1]

    calls = list(data.batch(steps, drop_remainder=True))
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        for batches in calls:
            many(*batches).numpy()
        seconds.append((time.perf_counter() - began) * len(data) / (len(calls) * steps))
    return seconds


def measure(
    data: dict[str, Any], steps: int, epochs: int, rounds: int
) -> dict[tuple[str, str, int | str], list[float]]:
    """Milliseconds a step of each epoch, by model and data, library and steps a call."""
    by_default: list[tuple[str, Callable[..., list[float]], int | str]] = [
        (PEER, keras_fit, 1),
        (OURS, ours, "auto"),
    ]
    variants = [
        *by_default,
        (OURS, ours, 1),
        (PEER, keras_fit, 10),
        (OURS, ours, 10),
        (BOUND, by_hand, CALL),
    ]
    times = defaultdict(list)
    for _ in range(rounds):
        for name, build, kind, compared in (
            ("MLP", mlp, "tf.data", variants),
            ("MLP, arrays", mlp, "arrays", by_default),
            ("CNN", cnn, "tf.data", variants),
        ):
            for who, run, at_once in compared:
                seconds = run(build, data[kind], epochs, at_once)[1:]  # the first compiles
                times[name, who, at_once] += [value / steps * 1e3 for value in seconds]
    return times


def main() -> None:
    args = arguments(__doc__).parse_args()
    claim_device(SingleWorld(), threads=1)  # before TensorFlow makes the data
    random = np.random.default_rng(0)
    x = random.random((BATCH * args.steps, 28, 28, 1), dtype=np.float32)
    y = random.integers(0, 10, len(x))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).cache().prefetch(4)
    data = {"tf.data": batches, "arrays": (x, y)}
    times = measure(data, args.steps, args.epochs, args.rounds)
    print("| model | steps a call | Model.fit | ktrainer | ratio |\n|---|---|---|---|---|")
    for name, who, steps in list(times):
        if who != OURS:
            continue
        # `auto`, our default, beside Keras' default.
        theirs = times[name, PEER, 1 if steps == "auto" else steps]
        mine = times[name, OURS, steps]
        a, b = statistics.median(mine), statistics.median(theirs)
        print(f"| {name} | {steps} | {b:.2f} ms | {a:.2f} ms | {a / b:.2f} |")
        values, bound = {OURS: mine, PEER: theirs}, ""
        if steps == "auto" and (by_hand_ms := times.get((name, BOUND, CALL))):
            values[BOUND], bound = by_hand_ms, BOUND
        record(args.results, *what_and_sizes(name, steps), values, bound=bound)


if __name__ == "__main__":
    main()
