"""What data parallelism costs through `Trainer.fit`, beside the same processes without it.

    ktrainer run -n 2 benchmarks/data_parallel_fit.py backend=data_parallel

An MLP of 2.9 million parameters (784-1024-1024-1024-10), SGD with momentum, 64 examples a
process, one thread a process. Each way of training is given arrays and a `tf.data.Dataset`:

- ktrainer: `Trainer.fit` on all of the data with all processes, one update a global batch.
- no communication: `Trainer.fit` with `backend=local` in each process on its part of the data, at
  the same time, with as many steps and the same settings: the bound.
- Model.fit in 2 at once: Keras' `Model.fit` in each process on its part, at the same time.

All take turns in one run, so that the ratios hold on a noisy machine; rank 0 prints the median
milliseconds of a step, over all epochs but each first one, and the ratio to the bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
import tensorflow as tf
from data_parallel_table import BATCH, NONE, sizes
from results import OURS, add_option, record

from ktrainer.config import LocalConfig
from ktrainer.distributed import SingleWorld, World

PEER = "Model.fit in 2 at once"


def build_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    return model


class EpochTimes(keras.callbacks.Callback):
    """Seconds of each epoch but the first, to the beginning of the next one. All processes of
    `world` begin the second epoch together: each has compiled its step by then."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.starts: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.world.barrier()
        self.starts.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        self.starts.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return np.diff(self.starts)[1:].tolist()


def rows(steps: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    count = steps * BATCH * processes
    return random.random((count, 784), dtype=np.float32), random.integers(0, 10, count)


def batched(data: tuple[np.ndarray, np.ndarray], size: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(size).cache().prefetch(4)


def keras_fit(world: World, data: Any, epochs: int) -> list[float]:
    times, plain = EpochTimes(world), {"epochs": epochs, "verbose": 0}
    if isinstance(data, tf.data.Dataset):
        build_model().fit(data, shuffle=False, callbacks=[times], **plain)
    else:
        build_model().fit(*data, batch_size=BATCH, callbacks=[times], **plain)
    return times.seconds


def without_communication(trainer: Trainer) -> Trainer:
    """A Trainer of this process alone, with the settings of `trainer`.

    `backend=local` is refused where several processes were started, so this one gets a world of
    one process, which has nobody to wait for. As data parallelism makes one update a call,
    `steps_per_call` is 1.
    """
    changes = {"backend": LocalConfig(), "run": replace(trainer.config.run, dir=None)}
    changes["trainer"] = replace(trainer.config.trainer, steps_per_call=1)
    with patch("ktrainer.trainer.open_world", return_value=SingleWorld()):
        return Trainer(trainer.config.with_changes(**changes))


def trainer_fit(world: World, trainer: Trainer, data: Any, epochs: int) -> list[float]:
    times, size = EpochTimes(world), BATCH * trainer.world.size
    if isinstance(data, tf.data.Dataset):
        trainer.fit(build_model(), data, epochs=epochs, callbacks=[times])
    else:
        trainer.fit(build_model(), *data, batch_size=size, epochs=epochs, callbacks=[times])
    return times.seconds


def measure(
    trainer: Trainer, steps: int, epochs: int, rounds: int
) -> dict[tuple[str, str], list[float]]:
    """Milliseconds a step, of each epoch, by data and by who trains; the variants take turns."""
    world, local = trainer.world, without_communication(trainer)
    arrays = rows(steps, world.size)
    part = tuple(np.ascontiguousarray(array[world.rank :: world.size]) for array in arrays)
    times = defaultdict(list)
    variants: dict[tuple[str, str], Callable[[], list[float]]] = {}
    for kind, everything, own in (
        ("arrays", arrays, part),
        ("tf.data", batched(arrays, BATCH * world.size), batched(part, BATCH)),
    ):
        variants[kind, PEER] = partial(keras_fit, world, own, epochs)
        variants[kind, NONE] = partial(trainer_fit, world, local, own, epochs)
        variants[kind, OURS] = partial(trainer_fit, world, trainer, everything, epochs)
    for _ in range(rounds):
        for variant, run in variants.items():
            world.barrier()
            times[variant] += [seconds / steps * 1e3 for seconds in run()]
    return times


def start(
    description: str | None, *, epochs: int, rounds: int
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line, with these defaults, and set TensorFlow's threads.

    Returns:
        The options, and the settings `key=value`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="steps an epoch")
    help_epochs = "epochs a round; the first compiles"
    parser.add_argument("--epochs", type=int, default=epochs, help=help_epochs)
    parser.add_argument("--rounds", type=int, default=rounds)
    add_option(parser)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    return parser.parse_known_args()


def main() -> None:
    args, overrides = start(__doc__, epochs=3, rounds=5)
    defaults = {"logging": {"progress": "none"}, "world": {"threads": 1}}
    trainer = Trainer.from_cli(argv=overrides, defaults=defaults)
    times = measure(trainer, args.steps, args.epochs, args.rounds)
    if trainer.world.is_root:
        print(f"{trainer.world.size} processes, batch {BATCH} each, {args.steps} steps an epoch")
        for kind in ("arrays", "tf.data"):
            values = {who: times[kind, who] for who in (OURS, PEER, NONE)}
            bound = statistics.median(values[NONE])
            for who, each in values.items():
                middle = statistics.median(each)
                print(f"{kind:8s} {who:22s} {middle:7.2f} ms a step   {middle / bound:5.2f}")
            what = f"step of Trainer.fit, {kind}"
            record(args.results, what, sizes(trainer.world.size), values, bound=NONE)


if __name__ == "__main__":
    main()
