"""Memory of a rank: that of `Trainer.fit`, and that of a hand-written loop with Horovod's tape.

    python benchmarks/rank_memory.py [--rounds 5]

An MLP of 16.8 million parameters (4 x 2048 x 2048), Adam, 2 processes. Each run is a start of its
own, and its memory that of the larger rank when it needed most: resident pages, TensorFlow's code
included. The Trainer's includes its checks before the first step, and what averages, audits and
saves. Each rank makes the data of all ranks, 4 MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from typing import Any

from results import OURS, add_option, record

WIDTH, LAYERS, BATCH, STEPS = 2048, 4, 64, 4  # more steps take no more memory
BY_HAND = "a loop with Horovod's tape"
PROCESSES = 2


def rows(processes: int) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    count = STEPS * BATCH * processes
    return random.random((count, WIDTH), dtype=np.float32), random.integers(0, 10, count)


def build_model() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    return model


def train_by_trainer() -> list[int]:
    """Train; return the bytes of each rank."""
    from ktrainer import Trainer

    words = ["backend=data_parallel", "backend.engine=mpi", "logging.progress=none"]
    trainer = Trainer(overrides=words)
    size = trainer.world.size
    trainer.fit(build_model, *rows(size), batch_size=BATCH * size, epochs=2)
    return trainer.world.allgather(most_used())


def train_by_hand() -> list[int]:
    """The same with a loop as a Horovod user writes it."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    model = build_model()
    model.optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        variables = [v.value for v in model.trainable_variables]
        model.optimizer.apply(tape.gradient(value, variables), model.trainable_variables)
        return value

    own = tuple(array[hvd.rank() :: hvd.size()] for array in rows(hvd.size()))
    data = tf.data.Dataset.from_tensor_slices(own).batch(BATCH)
    for _ in range(2):
        for batch in data:
            step(*batch)
    used: list[int] = hvd.allgather_object(most_used())
    hvd.shutdown()
    return used


def most_used() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(who: str) -> float:
    """Megabytes of the larger rank of a run."""
    launch = [sys.executable, "-m", "ktrainer.cli.main", "launch", "--no-prefix"]
    command = [*launch, "-n", str(PROCESSES), __file__, "--worker", who]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        sys.exit(f"{who}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return max(json.loads(lines[-1])) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=[OURS, BY_HAND], help=argparse.SUPPRESS)
    add_option(parser)
    args = parser.parse_args()
    if args.worker:
        used = train_by_trainer() if args.worker == OURS else train_by_hand()
        print(json.dumps(used), flush=True)
        return
    values: dict[str, list[float]] = {OURS: [], BY_HAND: []}
    for _ in range(args.rounds):
        for who, megabytes in values.items():
            megabytes.append(measure(who))
    for who, megabytes in values.items():
        print(f"{who:28} {statistics.median(megabytes):7.0f} MB")
    sizes = f"{LAYERS} dense layers of {WIDTH}, Adam, batch {BATCH}, {PROCESSES} processes"
    record(args.results, "memory of a rank, at its most", sizes, values, unit="MB")


if __name__ == "__main__":
    main()
