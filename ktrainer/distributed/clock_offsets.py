"""Offsets of the ranks' clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ktrainer.distributed.world import World

_ROUNDS = 20
_WHAT = "offsets of clocks"


@dataclass(frozen=True)
class ClockOffset:
    """Offset of this rank's `time.perf_counter` at a moment.

    Attributes:
        seconds: to add to it for that of rank 0.
        moment: of this rank's clock.
        error: seconds by which the offset of any rank may be wrong, at most.
    """

    seconds: float
    moment: float
    error: float


def clock_offset(world: World) -> ClockOffset:
    """Measure the offset by some barriers; all ranks call it together.

    No rank leaves a barrier before another one has entered it, which bounds the offset of two
    clocks from both sides. The quickest barrier counts, as clocks may drift apart meanwhile, and
    the offset is taken to be in the middle of its bounds.
    """
    rounds = []
    for _ in range(_ROUNDS):
        entered = time.perf_counter()
        world.barrier(_WHAT)
        rounds.append((entered, time.perf_counter()))
    first, *others = world.allgather(rounds, _WHAT)
    found = [(0.0, 0.0, first[0][0]), *(_quickest(first, other) for other in others)]
    _, seconds, moment = found[world.rank]
    return ClockOffset(seconds, moment, max(error for error, _, _ in found))


def _quickest(
    first: list[tuple[float, float]], other: list[tuple[float, float]]
) -> tuple[float, float, float]:
    """(error, offset, moment) by the barrier that took two ranks the least time."""
    found = []
    for (first_entered, first_left), (entered, left) in zip(first, other, strict=True):
        low, high = first_entered - left, first_left - entered
        found.append(((high - low) / 2, (low + high) / 2, (entered + left) / 2))
    return min(found)
