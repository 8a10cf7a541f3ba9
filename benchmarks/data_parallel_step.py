"""What a data-parallel step costs: no communication, our engines, and a hand-written loop.

A variant "only waits" has the mpi engine's step without its sums: the difference is what these
cost.

    ktrainer run -n 2 benchmarks/data_parallel_step.py [--engine horovod]
    mpirun -n 2 python benchmarks/data_parallel_step_torch.py  # the same with PyTorch's DDP

An MLP of 2.9 million parameters (784-1024-1024-1024-10), SGD with momentum, 64 examples a
process, one thread a process. All variants take turns in one run, so that the ratios hold on a
noisy machine; rank 0 prints the median milliseconds of a step and the ratio to "none". Each engine
has a run of its own: the thread with which Horovod listens takes time from all other variants.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from data_parallel_table import BATCH, arguments, in_turns, record_steps
from results import OURS

import ktrainer  # before TensorFlow, to keep its log quiet
from ktrainer.distributed import open_world
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.steps import CompiledProgram, StepOptions


@dataclass
class LocalBatch:
    batch: tuple[tf.Tensor, tf.Tensor]
    examples: int
    global_examples: int


def build_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def batches(rank: int, count: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
    random = np.random.default_rng(rank)
    return [
        (
            tf.constant(random.random((BATCH, 784), dtype=np.float32)),
            tf.constant(random.integers(0, 10, BATCH)),
        )
        for _ in range(count)
    ]


class OnlyWaits(MpiGradients):
    """Ranks wait for each other and exchange nothing: what is left if sums took no time."""

    def sum_bucket(self, weight: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        self.world.barrier()
        return list(arrays)


def ours(collectives: GradientCollectives | None, rank: int, size: int) -> Callable[[Any], Any]:
    program = CompiledProgram(build_model(), StepOptions(), collectives, rank)
    program.build((tf.TensorSpec([None, 784]), tf.TensorSpec([None], tf.int64)))
    rows = BATCH * (size if collectives is not None else 1)
    return lambda batch: program.train([LocalBatch(batch, BATCH, rows)])


def hand_written() -> Callable[[Any], Any]:
    """What a Horovod user writes today: a tape, an all-reduce a gradient, apply."""
    import horovod.tensorflow as hvd

    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.Mean()
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(value, variables)
        gradients = [hvd.allreduce(g, name=f"hand.{i}") for i, g in enumerate(gradients)]
        model.optimizer.apply(gradients, model.trainable_variables)
        metric.update_state(value)
        return metric.result()

    return lambda batch: step(*batch)


def read(logs: Any) -> None:
    """Wait for the values of logs."""
    tf.nest.map_structure(float, logs)


def show(times: dict[str, list[float]]) -> None:
    """Print medians, and medians of the ratios to "none" of the same round."""
    for name, values in times.items():
        ratios = [v / n for v, n in zip(values, times["none"], strict=True)]
        print(
            f"{name:20s} {statistics.median(values):7.2f} ms a step   "
            f"{statistics.median(ratios):5.2f} x none   (min {min(values):.2f})"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--engine", choices=["mpi", "horovod"], default="mpi")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    world = open_world()
    variants = {"none": ours(None, world.rank, world.size)}
    if args.engine == "mpi":
        variants["only waits"] = ours(OnlyWaits(world), world.rank, world.size)
        variants["mpi"] = ours(MpiGradients(world), world.rank, world.size)
    else:
        from ktrainer.distributed.horovod_gradients import HorovodGradients

        variants["horovod"] = ours(HorovodGradients(world), world.rank, world.size)
        variants["horovod, by hand"] = hand_written()
    data = batches(world.rank, args.steps)
    times = in_turns(variants, data, world.barrier, args.rounds, read)
    if world.is_root:
        print(f"ktrainer {ktrainer.__version__}, {world.size} processes, batch {BATCH} each")
        show(times)
        none = times["none"]
        if args.engine == "mpi":
            record_steps(args.results, world.size, OURS, times["mpi"], none)
        else:
            by_hand = times["horovod, by hand"]
            record_steps(args.results, world.size, "Horovod, by hand", by_hand, none)


if __name__ == "__main__":
    main()
