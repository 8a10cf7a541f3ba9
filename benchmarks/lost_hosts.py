"""Launches over two hosts, each of which loses one, until the time is over (root only).

    python benchmarks/lost_hosts.py [--minutes 20] [--every 120]

The hosts are network namespaces, as in the tests. In turns every process of the second host is
killed, or its link is cut; the run restarts on the first host. A line each: seconds from the loss
to the end of the launch, the largest relative difference of loss and weights (float64) from one
process that nothing disturbs, and how many files the launch has left in /dev/shm and in its
temporary folder. The exit code is 1 if a difference exceeds 1e-10 or a launch failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.harness.hosts import Hosts, why_no_hosts  # noqa: E402
from tests.faults.test_lost_hosts import LAUNCH, MORE, TRAINS, WORDS, found, lose  # noqa: E402

TOLERANCE = 1e-10


def undisturbed(folder: Path) -> list[np.ndarray]:
    """Losses and weights of one process."""
    script = folder / "script.py"
    script.write_text(TRAINS)
    words = [*LAUNCH, script, *WORDS, MORE[0]]
    done = subprocess.run(
        list(map(str, words)), cwd=folder, capture_output=True, text=True, check=True
    )
    return found(done.stdout)[1]


def one_loss(how: str, expected: list[np.ndarray]) -> bool:
    """Lose a host of a launch and print a line; return whether all is well."""
    made = Hosts(2)
    try:
        with tempfile.TemporaryDirectory() as name:
            lost = lose(made, how, Path(name), "--max-restarts", 2)
            left = [*made.folder.glob("*/shm/*"), *made.folder.glob("*/tmp/ktrainer-*")]
    finally:
        made.close()
    if lost.code:
        print(f"{how:6}  exit code {lost.code}\n{lost.errors}", flush=True)
        return False
    values = found(lost.out)[1]
    apart = max(
        float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-3)))
        for a, b in zip(values, expected, strict=True)
    )
    print(f"{how:6}  {lost.seconds:6.1f} s  {apart:.1e}  {len(left)} files left", flush=True)
    return apart <= TOLERANCE


def main() -> None:
    """Lose a host every so many seconds."""
    parser = argparse.ArgumentParser(description="Launches over hosts that are lost.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=120.0, metavar="S")
    args = parser.parse_args()
    if (reason := why_no_hosts()) is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        expected = undisturbed(Path(name))
    end, well = time.monotonic() + 60 * args.minutes, True
    for how in cycle(("killed", "cut")):
        next_one = time.monotonic() + args.every
        well &= one_loss(how, expected)
        if next_one >= end:
            break
        time.sleep(max(0.0, next_one - time.monotonic()))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
