"""What the benchmarks of data-parallel steps share: sizes, and the rows of the table of results."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import OURS, add_option, record

BATCH = 64
NONE = "no communication"


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=30, help="steps a round")
    parser.add_argument("--rounds", type=int, default=10)
    add_option(parser)
    return parser


def in_turns(
    variants: dict[str, Callable[[Any], Any]],
    data: Sequence[Any],
    barrier: Callable[[], Any],
    rounds: int,
    read: Callable[[Any], Any],
) -> dict[str, list[float]]:
    """Milliseconds a step, of each variant and round; the variants take turns.

    `read` waits for what the last step of a round returns.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, step in variants.items():
            barrier()
            start = time.perf_counter()
            for batch in data:
                logs = step(batch)
            read(logs)
            barrier()
            if number:  # the first compiles
                times[name].append((time.perf_counter() - start) / len(data) * 1e3)
    return times


def sizes(processes: int, model: str = "MLP of 2.9 M parameters", batch: int = BATCH) -> str:
    return f"{model}, {batch} examples a process, {processes} processes"


def record_steps(
    path: Path | None, sizes: str, who: str, step: Sequence[float], none: Sequence[float]
) -> None:
    """Record one library's step: as it is, and in steps of that library without communication.

    Only ktrainer's step without communication is a bound of ktrainer's; the second row compares
    what two libraries add to steps that differ by the libraries' kernels.
    """
    what, own = "data-parallel step", {who: step}
    if who == OURS:
        record(path, what, sizes, {**own, NONE: none}, bound=NONE)
    else:
        record(path, what, sizes, own)
    ratios = [a / b for a, b in zip(step, none, strict=True)]
    record(path, f"{what} / step alone", sizes, {who: ratios}, unit="x")
