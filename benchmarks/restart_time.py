"""How long two ranks take to start, and to continue after one of them is killed.

    python benchmarks/restart_time.py [--rounds 5]

The network of `examples/digits.py` on as many random images, one thread a process. Start: from the
command to the end of the first update on both ranks, in turns with the bound: `Model.fit` alone in
two processes at once, which import TensorFlow, trace a step and slow one another down, too.
Restart: from the loss of a rank (by SIGKILL) to the end of the first update after `--max-restarts`
has started both again from a checkpoint, without the pause of `--backoff`; as often as there are
rounds in one run, whose ranks are forks of a warm process, and in one where they import TensorFlow
again (`--no-warm`). Shown are the medians and all values, in seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from results import OURS, add_option, record

RUN = [sys.executable, "-m", "ktrainer.cli.main", "run", "-n", "2", "--threads", "1"]
TWO, COLD = "Model.fit in 2 at once", "ktrainer, --no-warm"
START, RESTART = "launch of 2 ranks, to the first update", "restart of 2 ranks, to the next update"
SIZES = "CNN of examples/digits.py, batch 64"
QUIET_SECONDS = 1.0  # a warm process that has not computed for so long has imported TensorFlow
MOST_SECONDS = 120.0  # for anything


def train(notes: Path, way: str, words: list[str]) -> None:
    """Train, with ktrainer or with Keras alone; write down when each update ended."""
    if way == "ours":
        from ktrainer import Trainer

        trainer = Trainer.from_cli(argv=words)
    import keras
    import numpy as np

    file = (notes / str(os.getpid())).open("w", buffering=1)
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: file.write(f"{time.time()}\n")
    )
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    x, y = random.random((1437, 8, 8, 1), dtype=np.float32), random.integers(0, 10, 1437)
    if way == "ours":
        trainer.fit(model, x, y, batch_size=64, callbacks=[noted])
    else:
        model.fit(x, y, batch_size=64, verbose=0, callbacks=[noted])


class Launch:
    """Processes that train, and when their updates ended.

    Args:
        commands: one for each program to start.
        way: `"ours"` or `"keras"`.
        words: `key=value`.
    """

    def __init__(self, *commands: list[str], way: str, words: tuple[str, ...] = ()) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.notes = Path(self.folder.name, "notes")
        self.notes.mkdir()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        more = [__file__, "--train", str(self.notes), way, *words]
        more += [f"run.dir={self.folder.name}/run"] if way == "ours" else []
        self.began = time.time()
        self.programs = [
            subprocess.Popen([*command, *more], stdout=self._log, stderr=self._log)
            for command in commands
        ]

    def updates(self, before: set[str] | None = None) -> dict[str, list[float]]:
        """When updates ended, by process id; not of processes that were there `before`."""
        found = {}
        for path in self.notes.iterdir():
            ends = path.read_text().split("\n")[:-1]
            if ends and path.name not in (before or set()):
                found[path.name] = [float(end) for end in ends]
        return found

    def first_update(self, processes: int, before: set[str] | None = None) -> float:
        """When the last of these processes ended its first update."""
        until = time.monotonic() + MOST_SECONDS
        while len(found := self.updates(before)) < processes:
            if time.monotonic() > until or all(p.poll() is not None for p in self.programs):
                self._log.seek(0)
                sys.exit(self._log.read() or "no update")
            time.sleep(0.02)
        return max(ends[0] for ends in found.values())

    def close(self) -> None:
        for program in self.programs:
            program.terminate()
            program.wait()
        self._log.close()
        self.folder.cleanup()


def start(*commands: list[str], way: str) -> float:
    """Seconds from the start of programs to the end of the first update of both processes."""
    words = ("backend=data_parallel", "logging.progress=none") if way == "ours" else ()
    launch = Launch(*commands, way=way, words=words)
    try:
        return launch.first_update(2) - launch.began
    finally:
        launch.close()


def restarts(losses: int, *options: str) -> list[float]:
    """Seconds from each loss of a rank to the end of the first update of the ranks after it."""
    words = ("backend=data_parallel", "logging.progress=none", "trainer.epochs=100000")
    command = [*RUN, "--max-restarts", str(losses), "--backoff", "0.001", *options]
    launch = Launch(command, way="ours", words=(*words, "checkpoint.every=100ba"))
    seconds = []
    try:
        launch.first_update(2)
        if not options:
            _wait_for_warm_process(launch.programs[0].pid)
        for _ in range(losses):
            time.sleep(1)  # there is a new checkpoint
            ranks = set(launch.updates())
            os.kill(int(max(ranks, key=int)), signal.SIGKILL)
            killed = time.time()
            seconds.append(launch.first_update(2, before=ranks) - killed)
    finally:
        launch.close()
    return seconds


def _wait_for_warm_process(launcher: int) -> None:
    import psutil

    def warm() -> list[psutil.Process]:
        children = psutil.Process(launcher).children()
        return [each for each in children if "ktrainer.launch.warm_process" in each.cmdline()]

    while not (found := warm()):
        time.sleep(0.1)
    seconds = -1.0
    while seconds < (now := sum(found[0].cpu_times()[:2])):
        seconds = now
        time.sleep(QUIET_SECONDS)


def main() -> None:
    if "--train" in sys.argv:
        notes, way, *words = sys.argv[sys.argv.index("--train") + 1 :]
        train(Path(notes), way, words)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    add_option(parser)
    args = parser.parse_args()
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    os.environ |= {**dict.fromkeys(names, "1"), "TF_NUM_INTEROP_THREADS": "2"}
    os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    python = [sys.executable]
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(args.rounds):
        seconds[START][OURS].append(start(RUN, way="ours"))
        seconds[START][TWO].append(start(python, python, way="keras"))
    seconds[RESTART][OURS] = restarts(args.rounds)
    seconds[RESTART][COLD] = restarts(args.rounds, "--no-warm")
    for what, values in seconds.items():
        print(what)
        for who, each in values.items():
            every = ", ".join(f"{value:.2f}" for value in each)
            print(f"    {who:32} {statistics.median(each):6.2f} s  ({every})")
        record(args.results, what, SIZES, values, bound=TWO if what == START else "", unit="s")


if __name__ == "__main__":
    main()
