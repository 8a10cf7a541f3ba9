"""What the two pipeline benchmarks share: sizes, rounds, and the table that they print."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from results import OURS, add_option, record

WIDTH, DEPTH, MODEL_WIDTH, BLOCKS, SEQUENCE, TOKENS = 1024, 8, 256, 4, 64, 256
SIZES = {
    "dense": f"{DEPTH} dense layers of {WIDTH}, 256 examples",
    "transformer": f"{BLOCKS} blocks of {MODEL_WIDTH}, 64 sequences of {SEQUENCE}",
}
BOUND = "stages that never wait"
HEADER = (
    "model        schedule     M  single ms  no waits ms  pipeline ms  speed-up  ideal  of ideal"
    "  of possible"
)


def arguments(description: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=5, help="steps a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--schedules", nargs="+", default=["1f1b"], help="the first is compared")
    parser.add_argument("--models", nargs="+", default=[*models], choices=[*models])
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)
    add_option(parser)
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
    """Milliseconds a step of each, by round, the slowest rank counting; "single" runs on rank 0
    alone."""
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


def row(
    name: str, schedule: str, microbatches: int, size: int, times: dict[str, list[float]]
) -> str:
    """A line of the table: medians of all rounds, and what follows from them."""
    ideal = microbatches / (microbatches + size - 1)
    single, pipeline = median(times["single"]), median(times[schedule])
    text = f"{name:12s} {schedule:11s} {microbatches:2d} {single:10.1f} "
    free = median(times.get(f"{schedule}, no waits", [0.0]))
    text += f"{free:12.1f} " if free else f"{'-':>12s} "
    speedup = single / pipeline
    text += f"{pipeline:12.1f} {speedup:9.2f} {ideal:6.3f} {speedup / size / ideal:9.3f} "
    return text + (f"{free / pipeline / ideal:12.3f}" if free else f"{'-':>12s}")


def record_case(
    args: argparse.Namespace,
    name: str,
    microbatches: int,
    size: int,
    who: str,
    times: dict[str, list[float]],
) -> None:
    """Record one library's step: as it is, over the ideal, and with other schedules.

    The ideal is "single", divided by the stages, with the bubble. It compares pipelines of two
    libraries whose kernels differ; `BOUND` is what the machine makes of it.
    """
    schedule, *others = args.schedules
    what, values = f"pipeline step, {name}", {who: times[schedule]}
    sizes = f"{SIZES[name]}, {microbatches} microbatches, {size} stages, {schedule}"
    bubble = (microbatches + size - 1) / microbatches
    bound = BOUND if who == OURS else ""
    if bound:
        values[BOUND] = [t * bubble for t in times[f"{schedule}, no waits"]]
    record(args.results, what, sizes, values, bound=bound)
    ideal = [t / size * bubble for t in times["single"]]
    over = {
        name: [a / b for a, b in zip(each, ideal, strict=True)] for name, each in values.items()
    }
    record(args.results, f"{what} / ideal", sizes, over, bound=bound, unit="x")
    for other in others:
        both = {who: times[other], f"the same with {schedule}": times[schedule]}
        record(args.results, f"{what}, {other}", sizes.replace(schedule, other), both)
