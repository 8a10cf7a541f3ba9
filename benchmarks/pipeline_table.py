"""What the two pipeline benchmarks share: sizes, rounds, and the table that they print."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

WIDTH, DEPTH, MODEL_WIDTH, BLOCKS, SEQUENCE, TOKENS = 1024, 8, 256, 4, 64, 256
HEADER = "model         M  single ms  pipeline ms  speed-up  efficiency  ideal  of ideal"


def arguments(description: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=5, help="steps a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--models", nargs="+", default=[*models], choices=[*models])
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    return parser


def pin(rank: int) -> None:
    """Keep this process on one core of its own, if there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def measure(
    steps: dict[str, Callable[[], Any]],
    args: argparse.Namespace,
    rank: int,
    barrier: Callable[[], Any],
) -> dict[str, list[float]]:
    """Milliseconds a step of each, by round; "single" runs on rank 0 alone."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 1):
        for name, step in steps.items():
            barrier()
            start = time.perf_counter()
            for _ in range(args.steps if rank == 0 or name != "single" else 0):
                step()
            if name != "single":
                barrier()
            if round_:  # the first compiles
                times[name].append((time.perf_counter() - start) / args.steps * 1e3)
    barrier()
    return times


def row(name: str, microbatches: int, size: int, times: dict[str, list[float]]) -> str:
    """Medians; the ratio is the median of the rounds' ratios."""
    ratios = [s / p for s, p in zip(times["single"], times["pipeline"], strict=True)]
    speedup, ideal = statistics.median(ratios), microbatches / (microbatches + size - 1)
    medians = [statistics.median(times[kind]) for kind in ("single", "pipeline")]
    return (
        f"{name:12s} {microbatches:2d} {medians[0]:10.1f} {medians[1]:12.1f} {speedup:9.2f} "
        f"{speedup / size:11.3f} {ideal:6.3f} {speedup / size / ideal:9.3f}"
    )
