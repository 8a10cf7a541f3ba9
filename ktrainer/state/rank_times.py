"""Comparisons of times over ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ktrainer.state.time_shares import COMMUNICATION

LEAST_RATIO = 1.5  # of a computing time to the usual one
LEAST_EXCESS = 0.005  # seconds a step


def is_longer(seconds: float, usual: float, least_excess: float = 0.0) -> bool:
    """Whether a computing time is much longer than the usual one; infinity: none is known."""
    excess = seconds - usual
    return seconds > LEAST_RATIO * usual and excess > max(LEAST_EXCESS, least_excess)


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


def least_communication(ranks: Sequence[Mapping[str, float]]) -> float:
    """Seconds in communication of the rank that waits least for others.

    Args:
        ranks: seconds by share of each rank.
    """
    return min(seconds.get(COMMUNICATION, 0.0) for seconds in ranks)


def waits_for_last(communication: Sequence[float]) -> tuple[int, list[float]]:
    """The rank that was last to arrive, and how long each rank waited for it: what it spent in
    communication more than that rank, which waits for no other.

    Args:
        communication: seconds of each rank.
    """
    least = min(communication)
    return communication.index(least), [seconds - least for seconds in communication]
