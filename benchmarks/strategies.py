"""Steps a second under each strategy: ours, and Keras' own `fit` where that runs.

    python benchmarks/strategies.py [--steps 60] [--epochs 5] [--rounds 2]

An MLP (784-256-256-10) and a small CNN (28 x 28 x 1), SGD with momentum, 128 examples a global
batch, two devices or processes of one thread each. Ours and Keras' take turns in the processes of
one run; the median epoch of all runs counts, without the first of each turn. Multi-worker steps
take turns with data-parallel ones, too, and with their bound: steps without Keras' loop, metrics
and data, whose gradients TensorFlow adds up in one collective. Keras' `fit` does not run on several
workers as it is: here it has the two patches without which it fails. It does not run with parameter
servers at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from results import OURS, add_option, record

BATCH = 128
PEER = "Model.fit under the strategy"
BOUND = "a bare step"
MODELS = {"mlp": "MLP 784-256-256-10", "cnn": "CNN, 8 and 16 filters"}
SEVERAL_WORKERS = "multi-worker mirrored, 2"
RUNS = {  # name -> (how to start, configuration, whether Keras' fit has such a strategy)
    "one process": ([], ["backend=local"], True),
    "mirrored, 2 devices": ([], ["mirrored", "backend.devices=2"], True),
    "central storage, 2 devices": ([], ["central_storage", "backend.devices=2"], True),
    SEVERAL_WORKERS: (["-n", "2"], ["multi_worker_mirrored"], True),
    "data_parallel, 2": (["-n", "2"], ["backend=data_parallel", "backend.engine=mpi"], False),
    "parameter server, 2 + 1, step": (
        ["--workers", "2", "--servers", "1"],
        ["parameter_server", "backend.join=step"],
        False,
    ),
    "parameter server, 2 + 1, epoch": (
        ["--workers", "2", "--servers", "1"],
        ["parameter_server"],
        False,
    ),
}
WHO = {"ours": OURS, "bare": BOUND, "keras": PEER}  # by role, in the order of their turns


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--roles", nargs="+", choices=[*WHO])
    parser.add_argument("--model", choices=[*MODELS], default="mlp")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--only", nargs="+", choices=[*RUNS], default=[*RUNS])
    add_option(parser)
    args, words = parser.parse_known_args()
    if args.roles:
        run_one(args, words)
        return
    print(f"{'steps a second':32}" + "".join(f"{m + ' ours':>10}{'fit':>8}" for m in args.models))
    failed = False
    for name in args.only:
        line = f"{name:32}"
        for model in args.models:
            times = in_turns(name, model, args)
            failed |= not all(times.values())
            for who, width in ((OURS, 10), (PEER, 8)):
                rate = 1e3 / statistics.median(times[who]) if times.get(who) else None
                line += f"{rate:{width}.1f}" if rate else f"{'-':>{width}}"
            sizes = f"{MODELS[model]}, batch {BATCH}"
            done = {who: values for who, values in times.items() if values}
            bound = BOUND if BOUND in done else ""
            record(args.results, f"step of fit, {name}", sizes, done, bound)
        print(line, flush=True)
    if failed:
        sys.exit("runs have failed: see above")


def in_turns(name: str, model: str, args: Any) -> dict[str, list[float]]:
    """Milliseconds a step, by library, of those whose runs did not fail."""
    turns = {name: ["ours", *(["keras"] if RUNS[name][2] else [])]}
    if name == SEVERAL_WORKERS:
        turns = {name: ["ours", "bare", "keras"], "data_parallel, 2": ["ours"]}
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for run, roles in turns.items():
            for role, values in measured(run, roles, model, args).items():
                who = WHO[role] if run == name else f"ktrainer's {run}"
                times.setdefault(who, []).extend(values)
    return times


def measured(run: str, roles: list[str], model: str, args: Any) -> dict[str, list[float]]:
    """Milliseconds a step, by role, of each epoch but the first; none of a run that fails."""
    starter, words, _ = RUNS[run]
    own = [__file__, "--roles", *roles, "--model", model]
    own += ["--steps", str(args.steps), "--epochs", str(args.epochs)]
    if not words[0].startswith("backend="):
        words = ["backend=tf_distribute", f"backend.strategy={words[0]}", *words[1:]]
    start = [sys.executable]
    if starter:
        start = [sys.executable, "-m", "ktrainer.cli.main", "launch", "--no-prefix", *starter]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "2",
    }
    done = subprocess.run(
        [*start, *own, *words], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith('{"seconds"')]
    if not lines:
        print(done.stderr[-2000:], file=sys.stderr)
        return {role: [] for role in roles}
    seconds = json.loads(lines[0])["seconds"]
    return {role: [each / args.steps * 1e3 for each in seconds[role][1:]] for role in roles}


def run_one(args: Any, words: list[str]) -> None:
    """Measure in this process, as one of however many were started."""
    from ktrainer import Trainer

    quiet = {"logging": {"progress": "none", "csv": False}, "health": {"audit_every": None}}
    quiet |= {"trainer": {"epochs": args.epochs}, "data": {"batch_size": BATCH, "shuffle": False}}
    trainer = Trainer.from_cli(argv=words, defaults=quiet)

    import keras
    import numpy as np

    class Epochs(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    random = np.random.default_rng(0)
    shape = (784,) if args.model == "mlp" else (28, 28, 1)
    x = random.random((args.steps * BATCH, *shape), np.float32)
    y = random.integers(0, 10, len(x))
    epochs = {role: Epochs() for role in args.roles}
    for role, each in epochs.items():
        if role == "bare":
            own = slice(trainer.world.rank, BATCH, trainer.world.size)
            with_collective(trainer.strategy, args, x[own], y[own], each)
        elif role == "ours":
            trainer.fit(lambda: build(args.model), (x, y), callbacks=[each])
        else:
            with_keras(trainer, args, x, y, each)
    if trainer.world.is_root:
        print(json.dumps({"seconds": {r: each.seconds for r, each in epochs.items()}}), flush=True)


def build(name: str) -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(256, "relu"), layers.Dense(256, "relu")]
    inputs = keras.Input((784,))
    if name == "cnn":
        inputs = keras.Input((28, 28, 1))
        hidden = [
            layers.Conv2D(8, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
        ]
    model = keras.Sequential([inputs, *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])
    return model


def with_keras(trainer: Any, args: Any, x: Any, y: Any, epochs: Any) -> None:
    """`Model.fit` under the Trainer's strategy; what it is fed is ready when it is wanted, as
    ours is."""
    import tensorflow as tf

    if trainer.config.backend.name == "local":
        model = build(args.model)
        own = {"batch_size": BATCH, "shuffle": False, "callbacks": [epochs]}
        model.fit(x, y, epochs=args.epochs, verbose=0, **own)
        return
    several = trainer.world.size > 1
    if several:
        patch_fit()
    with trainer.strategy.scope():
        model = build(args.model)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policy.DATA if several else policy.OFF
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).prefetch(2)
    model.fit(data.with_options(options), epochs=args.epochs, verbose=0, callbacks=[epochs])


def with_collective(strategy: Any, args: Any, x: Any, y: Any, epochs: Any) -> None:
    """The same batch again and again; gradients are added up in one collective."""
    import tensorflow as tf

    with strategy.scope():
        model = build(args.model)
        weights = [v.value for v in model.trainable_variables]
        moving = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def update(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True)) / strategy.num_replicas_in_sync
        replica = tf.distribute.get_replica_context()
        summed = replica.all_reduce("sum", tape.gradient(loss, weights))
        for weight, momentum, gradient in zip(weights, moving, summed, strict=True):
            momentum.assign(0.9 * momentum - 0.01 * gradient)
            weight.assign_add(momentum)

    step = tf.function(lambda x, y: strategy.run(update, (x, y)))
    x, y = tf.constant(x), tf.constant(y)
    for epoch in range(args.epochs):
        epochs.on_epoch_begin(epoch)
        for _ in range(args.steps):
            step(x, y)
        weights[0].numpy()  # all steps are done
        epochs.on_epoch_end(epoch)


def patch_fit() -> None:
    """What Keras 3.15 needs to train on several workers at all."""
    from keras.src import tree
    from keras.src.backend.tensorflow import trainer as keras_trainer

    def build_symbolically(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if self._distribute_strategy is None:
            return
        local = self._distribute_strategy.experimental_local_results
        for _, _, batches in iterator or ():
            data_batch = tree.map_structure(lambda value: local(value)[0], next(batches))
            break
        with self._distribute_strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    def reduce_scalars(values: Any, strategy: Any, reduction: str) -> Any:
        return tree.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)

    keras_trainer.TensorFlowTrainer._maybe_symbolic_build = build_symbolically
    keras_trainer.reduce_per_replica = reduce_scalars


if __name__ == "__main__":
    main()
