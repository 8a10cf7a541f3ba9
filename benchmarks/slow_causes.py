"""What is named as slow where causes are planted, and where there are none; and what that costs.

    python benchmarks/slow_causes.py                 plant each cause; print what was named
    python benchmarks/slow_causes.py --clean 100     train without a cause; count what was named
    python benchmarks/slow_causes.py --overhead      cost of measuring a step

Settings such as `backend=pipeline backend.partitions=2` may follow. With `--hosts` the processes
are on two hosts: network namespaces, which only root can make.

Two data-parallel processes, one thread each, on steps of 10 to 20 ms. A busy core is one on which
another process spins; each rank has a core of its own then. A slow link is one of 100 Mbit/s
between two hosts. The overhead is that of the calls that measure, timed alone: in a step it would
drown in noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CAUSES = ("callback", "data", "cpu", "link")
SLOW_LINK = "tc qdisc add dev eth0 root tbf rate 100mbit burst 256kb latency 400ms"
STEPS, PLANTED = 120, 60
SECONDS = 0.03


def worker(cause: str, fits: int, settings: list[str]) -> None:
    """Train in this process; rank 0 prints what was named."""
    if cause == "cpu":  # before TensorFlow's threads start
        cores = sorted(os.sched_getaffinity(0))
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    from ktrainer import Callback, Trainer

    quiet = {"logging": {"progress": "none"}, "backend": "data_parallel"}
    trainer = Trainer.from_cli(argv=settings, defaults=quiet)
    import keras
    import numpy as np
    import tensorflow as tf

    class Plant(Callback):
        """Slows rank 1, or what it sends, from a step on."""

        spinner: subprocess.Popen | None = None

        def on_step_end(self, step: int, logs: Any = None) -> None:
            if self.world.rank != 1 or step < PLANTED:
                return
            if cause == "link" and step == PLANTED:
                subprocess.run(SLOW_LINK.split(), check=True)
            if cause == "callback":
                time.sleep(SECONDS)
            elif cause == "cpu" and self.spinner is None:
                self.spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])

        def close(self) -> None:
            if self.spinner is not None:
                self.spinner.kill()
                self.spinner.wait()
                self.spinner = None

    def slow(number: tf.Tensor, row: Any) -> Any:
        def wait(value: Any) -> Any:
            if value >= PLANTED:
                time.sleep(SECONDS)
            return value

        with tf.control_dependencies([tf.numpy_function(wait, [number], tf.int64)]):
            return tf.nest.map_structure(tf.identity, row)

    x = np.random.default_rng(0).normal(size=(128, 784)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x[:, :10])).repeat(STEPS)
    if cause == "data" and trainer.world.rank == 1:
        data = data.enumerate().map(slow)
    found = []
    for _ in range(fits):
        with trainer.scope():
            hidden = [keras.layers.Dense(1024, "relu") for _ in range(2)]
            model = keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])
            model.compile("sgd", "mse")
        trainer.fit(model, data, callbacks=[Plant()])
        found += [(s.step, s.rank, s.cause, s.message) for s in trainer.state.slow]
    if trainer.world.is_root:
        print("FOUND", json.dumps(found), flush=True)


def launch(
    cause: str, settings: list[str], fits: int = 1, on_hosts: bool = False
) -> list[list[Any]]:
    """What was named in trainings of two processes."""
    more = [str(Path(__file__).resolve()), "--worker", cause, "--fits", str(fits), *settings]
    command = [sys.executable, "-m", "ktrainer.cli.main", "run", "--threads", "1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    if on_hosts:
        done = run_on_hosts(command, more, env)
    else:
        command += ["-n", "2", *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (line,) = (line for line in done.stdout.splitlines() if "FOUND " in line)
    return json.loads(line.partition("FOUND ")[2])


def run_on_hosts(
    command: list[str], more: list[str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    from tests.dist.harness.hosts import Hosts

    hosts = Hosts(2)
    try:
        words = ["--hosts", ",".join(hosts.names), "--rsh", str(hosts.agent)]
        return hosts.run(0, *command, *words, *more, env=env, timeout=7200)
    finally:
        hosts.close()


def why_no_hosts() -> str | None:
    """The reason why there can be no two hosts here."""
    sys.path.insert(0, str(ROOT))
    from tests.dist.harness import hosts

    return hosts.why_no_hosts()


def planted(settings: list[str], on_hosts: bool) -> None:
    for cause in CAUSES:
        if cause == "link" and (reason := why_no_hosts()):
            print(f"{cause:9} not planted: {reason}")
            continue
        found = launch(cause, settings, on_hosts=on_hosts or cause == "link")
        for step, rank, name, message in found or [[0, None, "nothing", ""]]:
            where = "" if rank is None else f" on rank {rank}"
            print(f"{cause:9} named {name}{where} after {step - PLANTED} steps: {message}")


def clean(runs: int, settings: list[str], on_hosts: bool) -> None:
    found = launch("nothing", settings, runs, on_hosts)
    for step, _, _, message in found:
        print(f"step {step}: {message}")
    busy = sum(cause == "cpu" for _, _, cause, _ in found)
    print(
        f"{len(found)} named in {runs} trainings of {STEPS} steps, {busy} of them for lack of cores"
    )


def overhead() -> None:
    """Time the calls that a step makes: contexts, marks, and a comparison every three steps."""
    from ktrainer.state.rank_times import Window
    from ktrainer.state.slowness import SlowRules
    from ktrainer.state.time_shares import TimeShares

    times, count = TimeShares(), 10_000
    begin = time.perf_counter()
    for _ in range(count):
        for share in ("data", "compute", *(f"callback {i}" for i in range(12))):
            with times.of(share):
                pass
        times.read()
    step = (time.perf_counter() - begin) / count
    rules = SlowRules(0.1, compares=True)
    windows = [Window(dict.fromkeys(times.seconds, 0.001), 0.02, 0.06)] * 2
    begin = time.perf_counter()
    for number in range(1000):
        rules.judge(number, windows)
    judge = (time.perf_counter() - begin) / 1000
    print(f"a step: {step * 1e6:.1f} us; rules, every 3 steps or 40 ms: {judge * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clean", type=int, metavar="N", help="trainings without a cause")
    parser.add_argument("--hosts", action="store_true", help="on two hosts")
    parser.add_argument("--overhead", action="store_true", help="what measuring costs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--fits", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="of the trainings")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.fits, options.settings)
    elif options.hosts and (reason := why_no_hosts()):
        sys.exit(reason)
    elif options.overhead:
        overhead()
    elif options.clean:
        clean(options.clean, options.settings, options.hosts)
    else:
        planted(options.settings, options.hosts)


if __name__ == "__main__":
    main()
