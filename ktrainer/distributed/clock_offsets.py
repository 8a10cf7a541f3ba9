"""Offsets of the ranks' clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ktrainer.distributed.world import World

_ROUNDS = 20
_WHAT = "offsets of clocks"


@dataclass(frozen=True)
class ClockOffsets:
    """Offsets of the ranks' `time.perf_counter`.

    Attributes:
        seconds: for each rank, to add to its clock for that of rank 0.
        error: seconds by which one of them may be wrong, at most.
    """

    seconds: tuple[float, ...]
    error: float


def clock_offsets(world: World) -> ClockOffsets:
    """Measure the offsets by some barriers; all ranks call it together.

    No rank leaves a barrier before another one has entered it, which bounds the offset of two
    clocks from both sides. The bounds of all rounds together are as far apart as the quickest
    barrier took, and the offset is taken to be in the middle.
    """
    entered, left = [], []
    for _ in range(_ROUNDS):
        entered.append(time.perf_counter())
        world.barrier(_WHAT)
        left.append(time.perf_counter())
    every = world.allgather((entered, left), _WHAT)
    offsets, errors = [0.0], [0.0]
    first_entered, first_left = every[0]
    for entered, left in every[1:]:
        low = max(a - b for a, b in zip(first_entered, left, strict=True))
        high = min(a - b for a, b in zip(first_left, entered, strict=True))
        offsets.append((low + high) / 2)
        errors.append((high - low) / 2)
    return ClockOffsets(tuple(offsets), max(errors))
