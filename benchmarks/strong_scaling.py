"""Strong scaling: measured step times at 1 to 4 processes beside those that are predicted.

    python benchmarks/strong_scaling.py [--rounds 5] [--cases mlp pipeline slow ...]

Each round predicts with `ktrainer plan --world`. In every other round `ktrainer run` trains two
epochs with each number of processes, one thread a process. The table has medians over rounds and
epochs: milliseconds of a step, and predicted over measured. `make bench` runs the case mlp.

| case | model, batch of all processes | processes |
|---|---|---|
| mlp | 784-1024-1024-1024-10, 256 | 1, 2, 3, 4 on this host |
| buckets | the same with backend.bucket_mb=4: three buckets | 1, 2, 3, 4 on this host |
| pipeline | 8 dense layers of 1024, 256, 2 partitions, 8 microbatches | 2, 4 on this host |
| fast, slow, slower | mlp; no limit, 1 Gbit/s, 200 Mbit/s between hosts | 2, a host each |
| slow, 4 | mlp; 1 Gbit/s | 4 on two hosts |
| given | as slower, the network an option | 2 |

Hosts are network namespaces on this machine, as in the tests (root only), and share its cores: a
plan for them measures with as many processes as there will be. Where the kernel has no netem, links
have a rate and no delay.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from results import OURS, add_option, record

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.harness.hosts import Hosts, why_no_hosts  # noqa: E402

SCRIPT = """
import sys, time
import keras, numpy as np
from ktrainer import Callback, Trainer

class Clock(Callback):
    times = []

    def on_step_end(self, step, logs=None):
        self.times.append(time.perf_counter())

def dense(inputs, depth):
    hidden = [keras.layers.Dense(1024, "relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model

inputs, depth, batches = map(int, sys.argv[1:4])
keras.utils.set_random_seed(0)
with Trainer.from_cli(argv=sys.argv[4:], callbacks=[Clock()]) as trainer:
    random = np.random.default_rng(0)
    rows = batches * trainer.config.data.batch_size
    x, y = random.random((rows, inputs), dtype=np.float32), random.integers(0, 10, rows)
    trainer.fit(lambda: dense(inputs, depth), (x, y))
    if trainer.world.is_root:
        steps = np.diff(np.reshape(Clock.times, (-1, batches)))[:, 10:]
        print("medians", *1000 * np.median(steps, axis=1), flush=True)
"""
WORDS = ("logging.progress=none", "seed=1", "trainer.steps_per_call=1", "data.batch_size=256")
DATA_PARALLEL = ("backend=data_parallel", *WORDS)
PIPELINE = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=8", *WORDS)
EPOCHS = 2  # of a run
ROUNDS_PER_RUN = 2  # a run is made in every second round
LATENCY = "60us"  # of namespaces, through TCP; where the network is given


@dataclass(frozen=True)
class Case:
    """A model and where it runs.

    Attributes:
        model: inputs, hidden layers and batches.
        words: configuration.
        worlds: numbers of processes.
        per_host: processes on each of two hosts; 0: all on this one.
        rate: of their links, as `tc` has it; empty: no limit.
        given: tell the plan of the network instead of letting it measure.
    """

    model: tuple[int, int, int]
    words: tuple[str, ...]
    worlds: tuple[int, ...]
    per_host: int = 0
    rate: str = ""
    given: bool = False

    @property
    def sizes(self) -> str:
        cores = len(os.sched_getaffinity(0))
        return f"{self.model[1]} dense layers of 1024, 256 examples of all processes, {cores} cores"


MLP = (784, 3, 40)
PREDICTED = "predicted by ktrainer plan"
CASES = {
    "mlp": Case(MLP, DATA_PARALLEL, (1, 2, 3, 4)),
    "buckets": Case(MLP, (*DATA_PARALLEL, "backend.bucket_mb=4"), (1, 2, 3, 4)),
    "pipeline": Case((1024, 8, 30), PIPELINE, (2, 4)),
    "fast": Case(MLP, DATA_PARALLEL, (2,), 1),
    "slow": Case(MLP, DATA_PARALLEL, (2,), 1, "1gbit"),
    "slower": Case(MLP, DATA_PARALLEL, (2,), 1, "200mbit"),
    "slow, 4": Case(MLP, DATA_PARALLEL, (4,), 2, "1gbit"),
    "given": Case(MLP, DATA_PARALLEL, (2,), 1, "200mbit", given=True),
}


class Programs:
    """Runs `ktrainer` here, or on the first of two hosts."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.hosts = Hosts(2) if case.per_host else None
        if self.hosts is not None and case.rate:
            for host in range(2):
                self.hosts.slow(host, rate=case.rate)

    def close(self) -> None:
        if self.hosts is not None:
            self.hosts.close()

    def predicted(self) -> dict[int, float]:
        """Milliseconds of a step, by the number of processes."""
        case = self.case
        options = ["--world", ",".join(map(str, case.worlds)), "--threads=1"]
        if case.given:
            rate = case.rate.replace("gbit", "Gbit").replace("mbit", "Mbit")
            options += ["--per-host=1", f"--latency={LATENCY}", f"--bandwidth={rate}"]
        elif self.hosts is not None:
            options += self._on_hosts()
        else:
            options += [f"--per-host={max(case.worlds)}"]
        out = self._ktrainer("plan", *options, str(self._script), *self._words)
        rows = [line.split() for line in out.splitlines() if re.match(r" *\d+ +\d+ +[\d.]+ ", line)]
        return {int(row[0]): float(row[8]) for row in rows}

    def measured(self, processes: int) -> list[float]:
        """Milliseconds of a step in each epoch of one run."""
        where = self._on_hosts() if self.hosts is not None else ["-n", str(processes)]
        words = [str(self._script), *self._words, f"trainer.epochs={EPOCHS}"]
        out = self._ktrainer("run", *where, "--threads=1", *words)
        return [float(word) for word in out.partition("medians")[2].split()]

    @property
    def _script(self) -> Path:
        path = self.folder / "train.py"
        path.write_text(SCRIPT)
        return path

    @property
    def _words(self) -> list[str]:
        return [*map(str, self.case.model), *self.case.words, f"run.dir={self.folder}/run"]

    def _on_hosts(self) -> list[str]:
        assert self.hosts is not None
        names = ",".join(f"{name}:{self.case.per_host}" for name in self.hosts.names)
        return ["--hosts", names, "--rsh", str(self.hosts.network_agent)]

    def _ktrainer(self, *words: str) -> str:
        command = (sys.executable, "-m", "ktrainer.cli.main", *words)
        if self.hosts is not None:
            env = {"PYTHONPATH": str(ROOT)}
            done = self.hosts.run(0, *command, env=env, cwd=self.folder, timeout=300)
        else:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=self.folder, check=False
            )
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout}\n{done.stderr}")
        return done.stdout


def compare(case: Case, rounds: int) -> dict[int, tuple[list[float], list[float]]]:
    """Predicted and measured times of all rounds, by the number of processes."""
    found = defaultdict[int, tuple[list[float], list[float]]](lambda: ([], []))
    with tempfile.TemporaryDirectory() as name:
        programs = Programs(case, Path(name))
        try:
            for round_ in range(rounds):
                predicted = programs.predicted()
                for processes in case.worlds:
                    found[processes][0].append(predicted[processes])
                if round_ % ROUNDS_PER_RUN == 0:
                    for processes in case.worlds:
                        found[processes][1].extend(programs.measured(processes))
        finally:
            programs.close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Compare, and print a line for each case and number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    add_option(parser)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    print("case       processes  measured ms  predicted ms  predicted / measured")
    for name in args.cases:
        case = CASES[name]
        if case.per_host and (reason := why_no_hosts()) is not None:
            print(f"{name:10} {reason}")
            continue
        for processes, (predicted, measured) in compare(case, args.rounds).items():
            ratio = median(predicted) / median(measured)
            print(
                f"{name:10} {processes:9} {median(measured):12.2f} {median(predicted):13.2f} "
                f"{ratio:21.2f}",
                flush=True,
            )
            what = f"strong scaling, {name}: step on {processes} process{'es' * (processes > 1)}"
            record(args.results, what, case.sizes, {OURS: measured, PREDICTED: predicted})


if __name__ == "__main__":
    main()
