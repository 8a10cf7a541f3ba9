"""What callbacks, progress, audits and averaged metrics cost two processes, beside their steps.

    ktrainer run -n 2 benchmarks/callback_cost.py backend=data_parallel

The model is that of data_parallel_fit.py. "everything" is `Trainer.fit` as it is configured by
default, with its progress, logs, checks for NaN, audits of the weights and comparisons of the
ranks; "nothing" has none of these. They take turns. The average of 20 metrics, as at the end of an
epoch, is timed beside its bound: their states are read, and two arrays are reduced over ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
from data_parallel_fit import rows, start, trainer_fit
from data_parallel_table import sizes
from results import OURS, record

from ktrainer.distributed import World
from ktrainer.steps.metric_reduction import global_results
from ktrainer.steps.metric_states import take_states

EVERYTHING = {"logging": {"progress": "plain"}}
NOTHING = {
    "logging": {"progress": "none", "csv": False, "slow": None, "every": "1000000ba"},
    "health": {"audit_every": None, "nan": "ignore"},
}
METRICS, AVERAGES = 20, 50
BARE = "reading and two reductions"


def measure(trainers: dict[str, Trainer], args: Any) -> dict[str, list[float]]:
    """Milliseconds a step, of each epoch but the first of a round; the variants take turns."""
    world = next(iter(trainers.values())).world
    data = rows(args.steps, world.size)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(args.rounds):
        turns = list(trainers.items())
        for name, trainer in turns if number % 2 else turns[::-1]:
            world.barrier()
            seconds = trainer_fit(world, trainer, data, args.epochs)
            times[name] += [each / args.steps * 1e3 for each in seconds]
    return times


def averages(world: World) -> dict[str, list[float]]:
    """Milliseconds of an average of metrics over ranks, each begun by all ranks at once."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    names = [f"metric_{number}" for number in range(METRICS)]
    model.compile(
        keras.optimizers.SGD(0.0),
        "mse",
        metrics=[keras.metrics.MeanSquaredError(name) for name in names],
    )

    def bare() -> None:
        """What no average can do without: a comparison of names, and a sum of states."""
        states = take_states(model.metrics)
        world.oob_allreduce(np.zeros(2, np.int64), "max")
        world.oob_allreduce(np.zeros(2 + sum(map(len, states))), "sum")

    taken: dict[str, list[float]] = {OURS: [], BARE: []}
    for number in range(AVERAGES):
        x = np.full((4, 8), 1 + number + world.rank, np.float32)
        logs = model.train_on_batch(x, x[:, :1], return_dict=True)
        turns = [(OURS, partial(global_results, model.metrics, world, logs=logs)), (BARE, bare)]
        for who, action in turns if number % 2 else turns[::-1]:
            world.barrier()
            start = time.perf_counter()
            action()
            taken[who].append((time.perf_counter() - start) * 1e3)
    return taken


def show(name: str, values: Sequence[float], unit: str = "ms a step") -> None:
    print(f"{name:40s} {statistics.median(values):7.3f} {unit}")


def main() -> None:
    args, overrides = start(__doc__, epochs=4, rounds=4)
    trainers = {
        name: Trainer.from_cli(argv=overrides, defaults={**defaults, "world": {"threads": 1}})
        for name, defaults in (("everything", EVERYTHING), ("nothing", NOTHING))
    }
    times = measure(trainers, args)
    world = trainers["nothing"].world
    averaged = averages(world)
    if world.is_root:
        for name, values in times.items():
            show(name, values)
        for who, taken in averaged.items():
            show(f"{METRICS} metrics, {who}", taken, "ms an epoch")
        size = f"{sizes(world.size)}, {args.steps} steps an epoch"
        values = {OURS: times["everything"], "without them": times["nothing"]}
        what = "step with callbacks, progress and audits"
        record(args.results, what, size, values, bound="without them")
        ranks = f"{METRICS} metrics, {world.size} processes"
        record(args.results, "average of metrics over ranks", ranks, averaged, bound=BARE)


if __name__ == "__main__":
    main()
