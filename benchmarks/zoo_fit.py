"""Step times of each model of the tests' zoo: Keras' `Model.fit` and ktrainer by default.

    python benchmarks/zoo_fit.py [mlp transformer ...]

All run in one process, on batches of 16 rows from memory, 64 steps an epoch, with one thread for an
operation. `fit` of three epochs is called by turns on either; the median leaves out the first epoch
of each call, in which the step is compiled. Recorded are the models with the highest ratio
to `Model.fit` and with the median one (of an even number, the lower of the two in the middle).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
from keras_fit import EpochTimes
from results import OURS, add_option, record

from ktrainer.distributed import SingleWorld
from ktrainer.runtime.devices import claim_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.contracts.zoo import ZOO, Case

BATCH, STEPS, EPOCHS = 16, 64, 3
SIZES = f"models of the tests' zoo, batch {BATCH}, 1 process"
CONFIG = {
    "trainer": {"epochs": EPOCHS},
    "data": {"batch_size": BATCH, "shuffle": False},
    "logging": {"progress": "none", "csv": False},
    "checkpoint": {"resume": "never"},
    "world": {"threads": 1},
}


def milliseconds(times: EpochTimes) -> list[float]:
    return [seconds / STEPS * 1e3 for seconds in times.seconds[1:]]


def measure(case: Case, rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds a step of each epoch: ours, and Keras'."""
    data = case.data(BATCH * STEPS)
    options: Any = {"class_weight": case.class_weight} if case.class_weight else {}
    keras.utils.set_random_seed(0)
    peer, model = case.build(), case.build()
    ours: list[float] = []
    theirs: list[float] = []
    with Trainer(CONFIG) as trainer:
        for _ in range(rounds):
            x, y, weights = (*data, None, None)[:3]
            times = EpochTimes()
            plain: dict[str, Any] = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
            peer.fit(x, y, BATCH, sample_weight=weights, callbacks=[times], **plain, **options)
            theirs += milliseconds(times)
            times = EpochTimes()
            trainer.fit(model, data, callbacks=[times], **options)
            ours += milliseconds(times)
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    add_option(parser)
    args = parser.parse_args()
    claim_device(SingleWorld(), threads=1)  # before TensorFlow makes the models
    times, ratios = {}, {}
    print("| model | Model.fit | ktrainer | ratio |\n|---|---|---|---|")
    for name in args.models or ZOO:
        ours, theirs = measure(ZOO[name], args.rounds)
        a, b = statistics.median(ours), statistics.median(theirs)
        times[name], ratios[name] = {OURS: ours, "Model.fit": theirs}, a / b
        print(f"| {name} | {b:.2f} ms | {a:.2f} ms | {a / b:.2f} |", flush=True)
    ranked = sorted(ratios, key=ratios.__getitem__)
    for which, name in (("highest", ranked[-1]), ("median", ranked[(len(ranked) - 1) // 2])):
        what = f"step of the model with the {which} ratio to Model.fit"
        record(args.results, what, f"{name} of the {SIZES}", times[name])


if __name__ == "__main__":
    main()
