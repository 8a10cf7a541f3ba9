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
    "model         M  single ms  at once ms  pipeline ms  speed-up  ideal  of ideal  of possible"
)


def arguments(description: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """The options that both have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=5, help="steps a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
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
    """Milliseconds a step of each, by round; "single" runs on rank 0 alone.

    "at once" is the same on all ranks: as fast as cores are that share a memory, the slowest
    counting. No pipeline of equal stages can do its work faster than that.
    """
    steps = {"single": steps["single"], "at once": steps["single"], "pipeline": steps["pipeline"]}
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
    """A line of the table: medians of all rounds, and what follows from them."""
    ideal = microbatches / (microbatches + size - 1)
    single, at_once, pipeline = (median(times[kind]) for kind in ("single", "at once", "pipeline"))
    speedup, possible = single / pipeline, at_once / pipeline
    return (
        f"{name:12s} {microbatches:2d} {single:10.1f} {at_once:11.1f} {pipeline:12.1f} "
        f"{speedup:9.2f} {ideal:6.3f} {speedup / size / ideal:9.3f} {possible / size / ideal:12.3f}"
    )


def record_case(
    args: argparse.Namespace,
    name: str,
    microbatches: int,
    size: int,
    who: str,
    times: dict[str, list[float]],
) -> None:
    """Record one library's step: as it is, and over its bound, which counts from "single".

    The second row compares pipelines of two libraries whose kernels differ.
    """
    what, values = f"pipeline step, {name}", {who: times["pipeline"]}
    sizes = f"{SIZES[name]}, {microbatches} microbatches, {size} stages, {args.schedule}"
    least = [t / size * (microbatches + size - 1) / microbatches for t in times["single"]]
    if who == OURS:
        record(args.results, what, sizes, {**values, BOUND: least}, bound=BOUND)
    else:
        record(args.results, what, sizes, values)
    over = [a / b for a, b in zip(times["pipeline"], least, strict=True)]
    record(args.results, f"{what} / its bound", sizes, {who: over}, unit="x")
