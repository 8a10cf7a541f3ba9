"""Times of ranks, and comparisons of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_RATIO = 1.5  # of a computing time to the usual one
SHORT_OF_CPU_RATIO = 1.25  # the same, of a rank that is known to wait for its processors
LEAST_EXCESS = 0.005  # seconds a step


@dataclass(frozen=True)
class Window:
    """The last few steps of a rank.

    Attributes:
        seconds: of a step, by share.
        step_seconds: of a step in all.
        duration: seconds from its begin to its end.
        cpu: the part that its threads got of the processor time that they asked for; None: not
            measured, or they waited for it too little to matter.
        faults: pages a step that were read from the disk.
        stage: the slow stage of its input; None: not looked for.
    """

    seconds: Mapping[str, float]
    step_seconds: float
    duration: float
    cpu: float | None = None
    faults: float = 0.0
    stage: str | None = None


class Link(NamedTuple):
    """The slowest link.

    Attributes:
        text: a sentence on it.
        slower: whether it was measured to be much slower than before.
    """

    text: str
    slower: bool


def is_longer(
    seconds: float, usual: float, least_excess: float = 0.0, short_of_processors: bool = False
) -> bool:
    """Whether a computing time is much longer than the usual one; infinity: none is known."""
    ratio = SHORT_OF_CPU_RATIO if short_of_processors else LEAST_RATIO
    return seconds > ratio * usual and seconds - usual > max(LEAST_EXCESS, least_excess)


def medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of some values, the median of the others; infinity: there are none."""
    order, last = sorted(values), len(values) - 2
    if last < 0:
        return [math.inf] * len(values)
    found = []
    for value in values:
        mine = bisect_left(order, value)
        middle = [order[i + (i >= mine)] for i in (last // 2, (last + 1) // 2)]
        found.append(sum(middle) / 2)
    return found


def least_seconds(ranks: Sequence[Window], *shares: str) -> float:
    """Seconds in some shares, of the rank with the fewest: one that waits least for others."""
    return min(sum(window.seconds.get(share, 0.0) for share in shares) for window in ranks)


def waits_for_last(communication: Sequence[float]) -> tuple[int, list[float]]:
    """The rank that was last to arrive, and how long each rank waited for it: what it spent in
    communication more than that rank, which waits for no other.

    Args:
        communication: seconds of each rank.
    """
    least = min(communication)
    return communication.index(least), [seconds - least for seconds in communication]
