"""Saving and restoring: against the disk, against Keras' `save_weights`, and what a step waits.

    python benchmarks/checkpoint.py [--folder FOLDER] [--megabytes 400]

Throughput: the weights of a model of that size, written to one disk, flushed, and read back with
the files in the page cache, as after a restart on the same machine. `dd` copies as many zeros,
with fsync. Keras' `save_weights` does not flush; a second row flushes its file. Ours has a
checksum of every byte, and checks it. Variants take turns; shown is the median of all rounds.

Steps: a model of that size is trained with and without saving; shown are the median step, the
longest, and the median of those in which a save began. Recorded are those in which a save began,
and the longest of the steps from each asynchronous save to the next, during which it is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktrainer import Callback, Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
from keras import layers
from results import OURS, add_option, record

from ktrainer.checkpoint import Store, capture, read_checkpoint
from ktrainer.checkpoint.contents.restore_state import assign_state, pair_variables
from ktrainer.distributed import SingleWorld
from ktrainer.state.progress import Progress

ROUNDS = 15  # single saves, and `dd`, take 0.2 to 0.6 s
STEPS, EVERY = 60, 10
# What is recorded: by whom, and by which of the ways; the last is the bound.
COMPARED = {
    "save a checkpoint, flushed": {
        OURS: "save     ktrainer, flushed",
        "Keras' save_weights, flushed": "save     Keras save_weights, flushed",
        "dd with fsync": "save     dd with fsync",
    },
    "restore a checkpoint, checked": {
        OURS: "restore  ktrainer, checked",
        "Keras' load_weights": "restore  Keras load_weights",
        "dd": "restore  dd",
    },
}


def model_of(megabytes: float) -> keras.Model:
    """Dense layers with that much of float32, trained by SGD, which has no slots."""
    width = 1024
    count = max(1, round(megabytes * 1e6 / (4 * width * width)))
    inner = [layers.Dense(width, use_bias=False) for _ in range(count)]
    model = keras.Sequential([keras.Input((width,)), *inner, layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def throughput(folder: Path, megabytes: float) -> tuple[float, dict[str, list[float]]]:
    """Size in MB of the weights, and seconds of each way to save, and to restore."""
    model, world = model_of(megabytes), SingleWorld()
    size = sum(weight.numpy().nbytes for weight in model.weights) / 1e6
    ours, theirs, raw = folder / "ours", folder / "keras.weights.h5", folder / "zeros"

    def dd() -> None:
        words = ["dd", "if=/dev/zero", f"of={raw}", "bs=4M", f"count={round(size * 1e6 / 2**22)}"]
        subprocess.run([*words, "conv=fsync"], check=True, capture_output=True)

    def save() -> None:
        arrays, state = capture(model, Progress(), world)
        Store(ours).save(arrays, state, 1)

    def load() -> None:
        arrays, state = read_checkpoint(ours / "step-00000001")
        pairs = pair_variables(model, arrays, state, world)
        assign_state(model, pairs, arrays, state, world, callbacks=())

    def keras_flushed() -> None:
        model.save_weights(theirs)
        flush(theirs)

    def cached() -> None:
        words = ["dd", f"if={raw}", "of=/dev/null", "bs=4M"]
        subprocess.run(words, check=True, capture_output=True)

    ways: dict[str, Callable[[], Any]] = {
        "save     dd with fsync": dd,
        "save     ktrainer, flushed": save,
        "save     Keras save_weights": lambda: model.save_weights(theirs),
        "save     Keras save_weights, flushed": keras_flushed,
        "restore  dd": cached,
        "restore  ktrainer, checked": load,
        "restore  Keras load_weights": lambda: model.load_weights(theirs),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, run in ways.items():
            if name.startswith("save"):
                for path in {"dd": [raw], "kt": [], "Ke": [theirs]}[name[9:11]]:
                    path.unlink(missing_ok=True)
                if "ktrainer" in name:
                    shutil.rmtree(ours, ignore_errors=True)
                os.sync()
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return size, seconds


def show_throughput(size: float, seconds: dict[str, list[float]], results: Path | None) -> None:
    """Print MB/s of each way, and record them."""
    print(f"{size:.0f} MB of weights, median of {ROUNDS} rounds")
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"  {name:<38} {middle:7.3f} s  {size / middle:8.0f} MB/s")
    for what, rows in COMPARED.items():
        values = {who: [1e3 * value for value in seconds[row]] for who, row in rows.items()}
        record(results, what, f"{size:.0f} MB of weights", values, bound=[*rows][-1])


class Times(Callback):
    """Seconds from the end of a step to the end of the next: a save is in the one that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[int, float] = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._last = time.perf_counter()

    def on_step_begin(self, step: int) -> None:
        now = time.perf_counter()
        self.seconds[step] = now - self._last
        self._last = now


def steps(folder: Path, megabytes: float, size: float, results: Path | None) -> None:
    """Print the median step, and the longest with and without a save; record what a save adds."""
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * 64, 1024)).astype("float32")
    y = random.integers(0, 10, STEPS * 64)
    print(f"\nsteps of a model of {size:.0f} MB, batch 64, a save every {EVERY} steps")
    for name, words in {
        "no checkpoints": [],
        "asynchronous": [f"checkpoint.every={EVERY}ba"],
        "synchronous": [f"checkpoint.every={EVERY}ba", "checkpoint.asynchronous=false"],
    }.items():
        keras.utils.clear_session()
        times = Times()
        base = [f"run.dir={folder / name}", "data.batch_size=64", "logging.progress=none"]
        base += ["health.nan=ignore", "logging.csv=false"]
        with Trainer(overrides=[*base, *words], callbacks=[times]) as trainer:
            trainer.fit(lambda: model_of(megabytes), (x, y))
        shutil.rmtree(folder / name, ignore_errors=True)
        # The first ones are compiled, and fill the caches.
        seconds = {step: value for step, value in times.seconds.items() if step > 3}
        saving = [value for step, value in seconds.items() if step % EVERY == 0]
        show(name, list(seconds.values()), saving)
        if name == "no checkpoints":
            plain = list(seconds.values())
        else:
            record_steps(results, name, f"{size:.0f} MB of weights, batch 64", seconds, plain)


def record_steps(
    path: Path | None, name: str, sizes: str, seconds: dict[int, float], plain: list[float]
) -> None:
    """Record the steps in which a save begins, and the longest of those from each asynchronous save
    to the next, beside the steps of a run without checkpoints."""
    found = {f"step in which a save begins, {name}": [seconds[s] for s in seconds if not s % EVERY]}
    if name == "asynchronous":
        found[f"longest of {EVERY} steps from an asynchronous save to the next"] = [
            max(seconds[step] for step in range(first, first + EVERY))
            for first in range(EVERY, STEPS, EVERY)
        ]
    bound = "steps without checkpoints"
    for what, values in found.items():
        both = {OURS: [1e3 * value for value in values], bound: [1e3 * value for value in plain]}
        record(path, what, sizes, both, bound=bound)


def show(name: str, seconds: list[float], saving: list[float]) -> None:
    median = statistics.median(seconds)
    print(
        f"  {name:<16} median {1e3 * median:6.0f} ms   longest {1e3 * max(seconds):6.0f} ms, "
        f"{max(seconds) / median:.2f} medians   at a save {1e3 * statistics.median(saving):6.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: a new one")
    parser.add_argument("--megabytes", type=float, default=400.0)
    add_option(parser)
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as name:
        size, seconds = throughput(Path(name), args.megabytes)
        show_throughput(size, seconds, args.results)
        keras.utils.clear_session()
        steps(Path(name), args.megabytes, size, args.results)


if __name__ == "__main__":
    main()
