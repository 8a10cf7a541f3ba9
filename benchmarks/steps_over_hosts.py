"""Step times of two data-parallel processes over two hosts against one host (root only).

    python benchmarks/steps_over_hosts.py

The hosts are network namespaces on one machine, as in the tests, so their network is the machine's
memory. A model of 2.1 million float32 weights, 64 rows a step, one thread a process. A line for
each launch: the median of the steps after the first 20, and its ratio to that on one host.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.harness.hosts import Hosts, why_no_hosts  # noqa: E402

SCRIPT = """
import time
import keras, numpy as np
from ktrainer import Callback, Trainer

class Clock(Callback):
    times = []

    def on_step_end(self, step, logs=None):
        self.times.append(time.perf_counter())

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"), keras.layers.Dense(8)]
model = keras.Sequential([keras.Input((1024,)), *layers])
model.compile("sgd", "mse")
clock = Clock()
with Trainer.from_cli(callbacks=[clock]) as trainer:
    x = np.random.default_rng(0).normal(size=(64 * 120, 1024)).astype("float32")
    trainer.fit(model, (x, x[:, :8]))
    if trainer.world.is_root:
        print("median", 1000 * float(np.median(np.diff(clock.times)[20:])), flush=True)
"""
WORDS = ("backend=data_parallel", "data.batch_size=64", "logging.progress=none", "seed=1")
KINDS = {
    "one host": ("-n", "2"),
    "one host, --heal": ("-n", "2", "--heal"),
    "two hosts": ("--hosts", "HOSTS", "--rsh", "AGENT"),
    "two hosts, --heal": ("--hosts", "HOSTS", "--rsh", "AGENT", "--heal"),
}


def median(made: Hosts, options: tuple[str, ...], folder: Path) -> float:
    """Milliseconds of a step."""
    replaced = {"HOSTS": ",".join(made.names), "AGENT": str(made.network_agent)}
    words = [replaced.get(word, word) for word in options]
    command = (sys.executable, "-m", "ktrainer.cli.main", "launch", "--threads", 1, *words)
    done: subprocess.CompletedProcess[str] = made.run(
        0,
        *(*command, folder / "script.py", *WORDS, "data.batch=global", f"run.dir={folder}/run"),
        env={"PYTHONPATH": str(ROOT)},
        cwd=folder,
        timeout=180,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.partition("median")[2])


def main() -> None:
    """Measure each kind of launch twice, and print the better one."""
    if (reason := why_no_hosts()) is not None:
        sys.exit(reason)
    made = Hosts(2)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "script.py").write_text(SCRIPT)
            best = {
                kind: min(median(made, options, folder) for _ in range(2))
                for kind, options in KINDS.items()
            }
    finally:
        made.close()
    for kind, found in best.items():
        print(f"{kind:18} {found:7.2f} ms  {found / best['one host']:5.2f}")


if __name__ == "__main__":
    main()
