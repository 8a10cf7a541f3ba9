"""What a data-parallel step costs: no communication, our engines, and a hand-written loop.

A variant "only waits" has the mpi engine's step without its sums: the difference is what these
cost. With `--profile` there is one that does not even wait, and what the others cost is divided
into waiting for the later rank and what follows.

    ktrainer run -n 2 benchmarks/data_parallel_step.py [--engine horovod] [--model cnn] [--profile]
    mpirun -n 2 python benchmarks/data_parallel_step_torch.py  # the same with PyTorch's DDP

The model is one of `MODELS`, by default an MLP of 2.9 million parameters (784-1024-1024-1024-10)
with momentum; one thread a process. All variants take turns in one run, so that the ratios hold on
a noisy machine; rank 0 prints the median milliseconds of a step and the ratio to "none". Each
engine has a run of its own: the thread with which Horovod listens takes time from all variants.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from data_parallel_table import BATCH, arguments, in_turns, record_steps, sizes
from results import OURS

import ktrainer  # before TensorFlow, to keep its log quiet
from ktrainer.distributed import World, open_world
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.steps import CompiledProgram, StepOptions


@dataclass(frozen=True)
class Case:
    """A model, and the examples that a process trains it on.

    Attributes:
        sizes: of the model, for the table.
        batch: examples a process.
        shape: of an example.
        ids: number of different ids that examples consist of; 0: they are real numbers.
        layers: makes the layers of the model.
        momentum: SGD's.
    """

    sizes: str
    batch: int
    shape: tuple[int, ...]
    ids: int
    layers: Callable[[], list[Any]]
    momentum: float = 0.9

    def model(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        dtype = "int32" if self.ids else "float32"
        inputs = keras.Input(self.shape, dtype=dtype)
        outputs = inputs
        for layer in self.layers():
            outputs = layer(outputs)
        model = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=self.momentum), loss)
        return model

    def batches(self, rank: int, count: int) -> list[tuple[tf.Tensor, tf.Tensor]]:
        random = np.random.default_rng(rank)
        shape = (self.batch, *self.shape)
        return [
            (
                tf.constant(
                    random.random(shape, dtype=np.float32)
                    if not self.ids
                    else random.integers(0, self.ids, shape, np.int32)
                ),
                tf.constant(random.integers(0, 10, self.batch)),
            )
            for _ in range(count)
        ]

    @property
    def spec(self) -> tuple[tf.TensorSpec, tf.TensorSpec]:
        dtype = tf.float32 if not self.ids else tf.int32
        return tf.TensorSpec([None, *self.shape], dtype), tf.TensorSpec([None], tf.int64)


BY_HAND = "horovod, by hand"


def mlp() -> list[Any]:
    hidden = [keras.layers.Dense(1024, activation="relu") for _ in range(3)]
    return [*hidden, keras.layers.Dense(10)]


def cnn() -> list[Any]:
    layers = keras.layers
    return [
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10),
    ]


def transformer() -> list[Any]:
    layers = keras.layers

    def block(x: Any) -> Any:
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        hidden = layers.Dense(512, activation="gelu")(x)
        return layers.LayerNormalization()(x + layers.Dense(128)(hidden))

    embed, pool = layers.Embedding(1000, 128), layers.GlobalAveragePooling1D()
    return [embed, block, block, pool, layers.Dense(10)]


def embedding() -> list[Any]:
    layers = keras.layers
    dense = [layers.Dense(256, activation="relu"), layers.Dense(10)]
    return [layers.Embedding(200_000, 32), layers.Flatten(), *dense]


MODELS = {
    "mlp": Case("MLP of 2.9 M parameters", BATCH, (784,), 0, mlp),
    "cnn": Case("CNN, 32 and 64 filters, 28 x 28", BATCH, (28, 28, 1), 0, cnn),
    "transformer": Case("2 blocks of 128, sequences of 32", 16, (32,), 1000, transformer),
    "embedding": Case("embedding of 200,000 x 32, 32 ids", 256, (32,), 200_000, embedding, 0.0),
}


@dataclass
class LocalBatch:
    batch: tuple[tf.Tensor, tf.Tensor]
    examples: int
    global_examples: int


class NoWaits(MpiGradients):
    """Ranks exchange nothing: what is left are the operations around collectives, and updates of as
    many rows as with them."""

    def __init__(self, world: World, ids: int) -> None:
        super().__init__(world)
        self._ids = ids  # how many there are

    def sum_bucket(
        self, weight: np.ndarray, *arrays: np.ndarray, compressed: bool = True
    ) -> list[np.ndarray]:
        return list(arrays)

    def gather_slices(
        self, weight: np.ndarray, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As many rows as all ranks have: each rank updates all of them, however they come."""
        ids = [(indices + 1000 * rank) % self._ids for rank in range(self.size)]
        return np.concatenate([values] * self.size), np.concatenate(ids)


class OnlyWaits(NoWaits):
    """Ranks wait for each other and exchange nothing: what is left if sums took no time."""

    def sum_bucket(
        self, weight: np.ndarray, *arrays: np.ndarray, compressed: bool = True
    ) -> list[np.ndarray]:
        self.world.barrier()
        return super().sum_bucket(weight, *arrays)

    def gather_slices(
        self, weight: np.ndarray, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        self.world.barrier()
        return super().gather_slices(weight, values, indices)


class Profiled(MpiGradients):
    """The engine, with a barrier before each collective: what is waited for is not part of it.

    Attributes:
        seconds_of: of each call, by what it was.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seconds_of: dict[str, list[float]] = {"waiting for the later rank": []}

    def _profile(self, what: str, call: Callable[..., Any], *given: np.ndarray) -> Any:
        start = time.perf_counter()
        self.world.barrier()
        begun = time.perf_counter()
        found = call(*given)
        self.seconds_of["waiting for the later rank"].append(begun - start)
        self.seconds_of.setdefault(what, []).append(time.perf_counter() - begun)
        return found

    def sum_bucket(
        self, weight: np.ndarray, *arrays: np.ndarray, compressed: bool = True
    ) -> list[np.ndarray]:
        call = partial(super().sum_bucket, compressed=compressed)
        found: list[np.ndarray] = self._profile("sums", call, weight, *arrays)
        return found

    def gather_slices(
        self, weight: np.ndarray, values: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        call, given = super().gather_slices, (weight, values, indices)
        found: tuple[np.ndarray, np.ndarray] = self._profile("gathers", call, *given)
        return found

    def show(self, steps: int) -> None:
        """Print the milliseconds of a step, of so many."""
        for what, seconds in self.seconds_of.items():
            print(f"{what:28s} {1e3 * sum(seconds) / steps:7.2f} ms a step")


def ours(
    case: Case, collectives: GradientCollectives | None, rank: int, size: int
) -> Callable[[Any], Any]:
    program = CompiledProgram(case.model(), StepOptions(), collectives, rank)
    program.build(case.spec)
    rows = case.batch * (size if collectives is not None else 1)
    return lambda batch: program.train([LocalBatch(batch, case.batch, rows)])


def hand_written(case: Case) -> Callable[[Any], Any]:
    """What a Horovod user writes today: a tape, an all-reduce a gradient, apply."""
    import horovod.tensorflow as hvd

    model = case.model()
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
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--profile", action="store_true", help="divide the cost, with mpi")
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    world, case = open_world(), MODELS[args.model]
    ranks = (world.rank, world.size)
    variants = {"none": ours(case, None, *ranks)}
    profiled = Profiled(world) if args.profile and args.engine == "mpi" else None
    if profiled is not None:
        variants["no waits"] = ours(case, NoWaits(world, case.ids), *ranks)
        variants["profiled"] = ours(case, profiled, *ranks)
    if args.engine == "mpi":
        variants["only waits"] = ours(case, OnlyWaits(world, case.ids), *ranks)
        variants["mpi"] = ours(case, MpiGradients(world), *ranks)
    else:
        from ktrainer.distributed.horovod_gradients import HorovodGradients

        variants["horovod"] = ours(case, HorovodGradients(world), *ranks)
        variants[BY_HAND] = hand_written(case)
    data = case.batches(world.rank, args.steps)
    times = in_turns(variants, data, world.barrier, args.rounds, read)
    if world.is_root:
        print(f"ktrainer {ktrainer.__version__}, {world.size} processes, {case.sizes}")
        show(times)
        if profiled is not None:
            profiled.show((args.rounds + 1) * args.steps)
        who, name = (OURS, "mpi") if args.engine == "mpi" else ("Horovod, by hand", BY_HAND)
        what = sizes(world.size, case.sizes, case.batch)
        record_steps(args.results, what, who, times[name], times["none"])


if __name__ == "__main__":
    main()
