"""What the benchmarks of data-parallel steps share: sizes, and the rows of the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from results import OURS, record

BATCH = 64
NONE = "no communication"


def sizes(processes: int) -> str:
    return f"MLP of 2.9 M parameters, {BATCH} examples a process, {processes} processes"


def record_steps(
    path: Path | None, processes: int, who: str, step: Sequence[float], none: Sequence[float]
) -> None:
    """Record one library's step: as it is, and in steps of that library without communication.

    Only ktrainer's step without communication is a bound of ktrainer's; the second row compares
    what two libraries add to steps that differ by the libraries' kernels.
    """
    what, own = "data-parallel step", {who: step}
    if who == OURS:
        record(path, what, sizes(processes), {**own, NONE: none}, bound=NONE)
    else:
        record(path, what, sizes(processes), own)
    ratios = [a / b for a, b in zip(step, none, strict=True)]
    record(path, f"{what} / step alone", sizes(processes), {who: ratios}, unit="x")
