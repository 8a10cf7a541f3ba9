"""What a pipeline gains: two stages, two processes, against one process with one thread.

    ktrainer run -n 2 benchmarks/pipeline_step.py --schedules 1f1b interleaved zero_bubble
    mpirun -n 2 python benchmarks/pipeline_step_torch.py    # the same with PyTorch's pipelines

Two models: 8 dense layers of 1024 on 256 examples, and a transformer of 4 blocks (width 256,
sequences of 64) on 64. "single" is rank 0 alone, while the others wait: gradients of the same M
microbatches added up, one compiled function a microbatch, one update. "pipeline" is a step as the
Trainer runs it, metrics and update included. Both take turns in one run, one thread a process, so
that the ratios hold on a noisy machine. The ideal of single / (P x pipeline), for stages of equal
cost and transfers that take no time, is M / (M + P - 1) with 1F1B. "no waits" are the same stages,
actions and update on all ranks at the same time, with messages that are there already: what
remains where cores share a memory and stages are not equal. "of possible" counts from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ktrainer  # before TensorFlow, to keep its log quiet

# isort: split
import keras
import tensorflow as tf
from pipeline_table import (
    BLOCKS,
    DEPTH,
    HEADER,
    MODEL_WIDTH,
    SEQUENCE,
    TOKENS,
    WIDTH,
    arguments,
    measure,
    pin,
    record_case,
    row,
)
from results import OURS

from ktrainer.backends.pipeline.runtime.transport import Transport
from ktrainer.data.local_batch import bounds
from ktrainer.distributed import World, open_world
from ktrainer.steps import StepOptions


@dataclass
class LocalBatch:
    batch: tuple[tf.Tensor, tf.Tensor]
    examples: int
    global_examples: int


def dense() -> keras.Model:
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(10)])
    return compiled(model)


def transformer() -> keras.Model:
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = keras.layers.Embedding(TOKENS, MODEL_WIDTH)(tokens)
    for _ in range(BLOCKS):
        normed = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(4, MODEL_WIDTH // 4)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = keras.layers.Dense(4 * MODEL_WIDTH, "relu")(keras.layers.LayerNormalization()(x))
        x = x + keras.layers.Dense(MODEL_WIDTH)(hidden)
    return compiled(keras.Model(tokens, keras.layers.Dense(TOKENS)(x)))


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def dense_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.random((256, WIDTH), dtype=np.float32), random.integers(0, 10, 256)


def transformer_batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x, y = random.integers(0, TOKENS, (2, 64, SEQUENCE))
    return x.astype(np.int32), y


CASES = {"dense": (dense, dense_batch), "transformer": (transformer, transformer_batch)}


def single(
    build: Callable[[], keras.Model], batch: tuple[tf.Tensor, tf.Tensor], microbatches: int
) -> Callable[[], Any]:
    """A step of one process: the gradients of the microbatches, added up; one update."""
    model, rows = build(), int(batch[0].shape[0])
    trained = model.trainable_variables
    model.optimizer.build(trained)
    sums = [tf.Variable(tf.zeros(v.shape, v.dtype)) for v in trained]

    @tf.function
    def add_gradients(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, [v.value for v in trained])
        for total, gradient in zip(sums, gradients, strict=True):
            total.assign_add(tf.convert_to_tensor(gradient) / microbatches)
        return loss / microbatches

    @tf.function
    def update() -> None:
        model.optimizer.apply([tf.convert_to_tensor(total) for total in sums], trained)
        for total in sums:
            total.assign(tf.zeros_like(total))

    parts = [slice(*bounds(rows, part, microbatches)) for part in range(microbatches)]

    def step() -> float:
        losses = [add_gradients(batch[0][part], batch[1][part]) for part in parts]
        update()
        return sum(map(float, losses))

    return step


class KeptMessages:
    """In the place of a transport: first passes messages on, and keeps them; then gives them again
    without sending or waiting."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[Any, list[tf.Tensor]] = {}
        self.again = False

    def send(self, transfer: Any, tensors: Any) -> None:
        if not self.again:
            self._transport.send(transfer, tensors)

    def post_receive(self, transfer: Any, specs: Any) -> None:
        if not self.again:
            self._transport.post_receive(transfer, specs)

    def receive(self, transfer: Any, specs: Any) -> list[tf.Tensor]:
        if not self.again:
            self._kept[transfer] = self._transport.receive(transfer, specs)
        return self._kept[transfer]

    def finish(self) -> None:
        self._transport.finish()


def pipeline(
    build: Callable[[], keras.Model],
    batch: tuple[tf.Tensor, tf.Tensor],
    microbatches: int,
    schedule: str,
    args: argparse.Namespace,
    world: World,
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step of the Trainer's pipeline, and one whose messages are there already."""
    keras.utils.set_random_seed(0)  # as the Trainer does: the same weights
    rows = int(batch[0].shape[0])
    backend = {
        "name": "pipeline",
        "partitions": world.size,
        "microbatches": microbatches,
        "schedule": schedule,
        "chunks": args.chunks if schedule == "interleaved" else 1,
        "costs": args.costs,
    }
    trainer = ktrainer.Trainer(
        {"backend": backend, "data": {"batch_size": rows}, "world": {"threads": 1}}
    )
    program = trainer.backend.prepare(trainer.backend.build_model(build), StepOptions())
    program.build(tuple(tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in batch))
    share = LocalBatch(batch, rows, rows)
    runner = program._runner
    transport, kept = runner.transport, KeptMessages(runner.transport)

    def step() -> float:
        runner.transport = transport
        return program.train([share])["loss"]

    def step_without_waits() -> None:
        runner.transport = kept
        program.train([share])
        kept.again = True  # what this call has sent comes again in all later ones

    return step, step_without_waits


def main() -> None:
    parser = arguments(__doc__, [*CASES])
    parser.add_argument("--chunks", type=int, default=2, help="of the interleaved schedule")
    parser.add_argument("--costs", default="flops")
    args = parser.parse_args()
    world = open_world()
    if args.pin:
        pin(world.rank)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    size = world.size
    if world.is_root:
        print(f"ktrainer {ktrainer.__version__}, {size} processes of one thread")
        print(HEADER)
    for name in args.models:
        build, make_batch = CASES[name]
        batch = tuple(map(tf.constant, make_batch()))
        for count in args.microbatches:
            keras.utils.set_random_seed(0)
            steps = {"single": single(build, batch, count)}
            for schedule in args.schedules:
                both = pipeline(build, batch, count, schedule, args, world)
                steps[schedule], steps[f"{schedule}, no waits"] = both
            first = {schedule: steps[schedule]() for schedule in args.schedules}
            np.testing.assert_allclose([*first.values()], steps["single"](), rtol=1e-4)
            times = measure(steps, args, world.rank, world.barrier)
            if world.is_root:
                for schedule in args.schedules:
                    print(row(name, schedule, count, size, times), flush=True)
                record_case(args, name, count, size, OURS, times)


if __name__ == "__main__":
    main()
