"""Launches over several hosts, each of which loses something, until the time is over (root only).

    python benchmarks/lost_hosts.py [--minutes 20] [--every 120]

The hosts are network namespaces, as in the tests; the model is tiny, with 50 ms between updates. In
turns, with three hosts that heal: one rank is killed, every process of a host is killed, a host's
link is cut; with two hosts and `--max-restarts`: a host is killed. A line each: seconds from the
loss to its notice and from the notice to the end of the next update, the largest relative
differences of weights and of epochs' losses (float64) from one process that nothing disturbs, and
how many files the launch has left in /dev/shm and in its temporary folder. An epoch's loss misses
what a lost rank has counted in its last update. The exit code is 1 if a difference of weights
exceeds 1e-10 or a launch failed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.harness.hosts import Hosts, why_no_hosts  # noqa: E402
from tests.faults.test_lost_hosts import LAUNCH, MORE, TRAINS, WORDS, found, ranks_on, start  # noqa: E402

TOLERANCE = 1e-10
EPOCHS = "trainer.epochs=100"  # of 4 updates
CASES = (
    ("a rank, healed", 3, ("--heal",)),
    ("a host killed, healed", 3, ("--heal",)),
    ("a host cut off, healed", 3, ("--heal",)),
    ("a host killed, restarted", 2, ("--max-restarts", 2)),
)


def undisturbed(folder: Path) -> list[np.ndarray]:
    """Losses and weights of one process."""
    script = folder / "script.py"
    script.write_text(TRAINS)
    words = [*LAUNCH, script, *WORDS, MORE[0], EPOCHS]
    done = subprocess.run(
        list(map(str, words)), cwd=folder, capture_output=True, text=True, check=True
    )
    return found(done.stdout)[1]


def lose(case: str, made: Hosts) -> float:
    """Lose what the case says of the last host; returns when, in seconds since the epoch."""
    last = len(made.names) - 1
    now = time.time()
    if case.startswith("a rank"):
        os.kill(ranks_on(made, last)[0], signal.SIGKILL)
    elif "cut" in case:
        made.cut(last)
    else:
        made.kill(last)
    return now


def one_loss(
    case: str, count: int, options: tuple[object, ...], expected: list[np.ndarray]
) -> bool:
    """Lose something of a launch and print a line; return whether all is well."""
    made = Hosts(count)
    try:
        with tempfile.TemporaryDirectory() as name:
            launcher = start(made, Path(name), *options, EPOCHS)
            time.sleep(7)  # ranks wait 4 s in one step
            lost = lose(case, made)
            noticed: list[float] = []
            assert launcher.stderr is not None
            errors = launcher.stderr

            def watch() -> None:
                for line in errors:
                    if " lost" in line and not noticed:
                        noticed.append(time.time())

            watcher = threading.Thread(target=watch)
            watcher.start()
            assert launcher.stdout is not None
            out = launcher.stdout.read()
            watcher.join()
            code = launcher.wait()
            left = [*made.folder.glob("*/shm/*"), *made.folder.glob("*/tmp/ktrainer-*[!g]")]
    finally:
        made.close()
    if code or not noticed:
        print(f"{case}: exit code {code}\n{out}", flush=True)
        return False
    updates = [float(at) for at in re.findall(r"updated \d+ at ([\d.]+)", out)]
    after = min((at for at in updates if at > noticed[0]), default=float("nan"))
    losses, *weights = (
        float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-3)))
        for a, b in zip(found(out)[1], expected, strict=True)
    )
    print(
        f"{case:26} {noticed[0] - lost:7.2f} s {after - noticed[0]:7.2f} s  {max(weights):.1e} "
        f"{losses:.1e}  {len(left)} files left",
        flush=True,
    )
    return max(weights) <= TOLERANCE


def main() -> None:
    """Lose something every so many seconds."""
    parser = argparse.ArgumentParser(description="Launches over hosts that are lost.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=120.0, metavar="S")
    args = parser.parse_args()
    if (reason := why_no_hosts()) is not None:
        sys.exit(reason)
    os.environ["PAUSE"] = "0.05"  # after each update
    with tempfile.TemporaryDirectory() as name:
        expected = undisturbed(Path(name))
    print("lost                       noticed  updated after that  weights losses", flush=True)
    end, well = time.monotonic() + 60 * args.minutes, True
    for case, count, options in cycle(CASES):
        next_one = time.monotonic() + args.every
        well &= one_loss(case, count, options, expected)
        if next_one >= end:
            break
        time.sleep(max(0.0, next_one - time.monotonic()))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
