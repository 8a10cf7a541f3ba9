"""The search for the best cuts: exact dynamic programming over contiguous stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktrainer.backends.pipeline.partition.partition_inputs import Held

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Measures:
    """Time and sizes of every possible stage [i, j) of n nodes, as matrices of n + 1 by n + 1.

    Attributes:
        time: compute, and what crosses the cut behind.
        state: bytes of the variables with all that belongs to them, shared ones once.
        made: bytes of what nodes make of a microbatch.
        crossing: bytes over the cut before each position, 0 to n.
        total_time: of all nodes, without cuts.
        total_state: of all variables.
    """

    time: Matrix
    state: Matrix
    made: Matrix
    crossing: Matrix
    total_time: float
    total_state: float

    @classmethod
    def of(
        cls,
        times: Sequence[float],
        made: Sequence[int],
        spans: Sequence[tuple[int, int, int]],
        variables: Sequence[tuple[float, Sequence[int]]],
        time_per_byte: float,
    ) -> Measures:
        """Measures from what is known by position.

        Args:
            spans: of each tensor that is used again, the first and last cut it may cross (the
                cut before node k is k), and its bytes.
            variables: of each, its bytes in memory, and the positions that use it, ascending.
        """
        n = len(times)
        crossing = np.zeros(n + 2)
        for first, last, size in spans:
            crossing[first] += size
            crossing[max(first, last + 1)] -= size
        crossing = np.cumsum(crossing)[: n + 1]
        # Nothing is sent past the last stage: outputs have arrived there.
        crossing[n] = 0
        spent, sizes = (np.concatenate([[0.0], np.cumsum(x)]) for x in (times, made))
        return cls(
            time=spent[None, :] - spent[:, None] + time_per_byte * crossing[None, :],
            state=_state(n, variables),
            made=sizes[None, :] - sizes[:, None],
            crossing=crossing,
            total_time=float(spent[-1]),
            total_state=float(sum(size for size, _ in variables)),
        )

    def memory(self, held: Held) -> Matrix:
        """Bytes of each possible stage with the activations that it holds."""
        return self.state + held.received * self.crossing[:, None] + held.made * self.made

    def load(self, held: Held, weight: float) -> Matrix:
        """Weighted fraction of time and memory of each possible stage; inf if empty."""
        memory = self.memory(held)
        total_memory = memory[0, -1]
        load = np.zeros_like(self.time)
        if self.total_time > 0:
            load += (1 - weight) * self.time / self.total_time
        if total_memory > 0:
            load += weight * memory / total_memory
        return _only_stages(load)


def best_cuts(
    measures: Measures, held: Sequence[Held], weight: float, limit: int | None
) -> list[int] | None:
    """Find the cuts that minimise the greatest load; None if no stages fit the limit.

    Args:
        held: microbatches, by stage.
        weight: of memory, 0 to 1.
        limit: bytes that a stage may take.
    """
    loads = []
    for count in held:
        load = measures.load(count, weight)
        if limit is not None:
            load = np.where(measures.memory(count) <= limit, load, np.inf)
        loads.append(load)
    bound = _least_maximum(loads)
    if not np.isfinite(bound):
        return None
    # The same matrices again, so that comparing with the bound is exact.
    allowed = [load <= bound for load in loads]
    return _least_sum(allowed, loads, measures.crossing)


def least_peak(measures: Measures, held: Sequence[Held]) -> int:
    """The least number of bytes that the greatest stage can be brought to."""
    return int(np.ceil(_least_maximum([_only_stages(measures.memory(count)) for count in held])))


def _state(n: int, variables: Sequence[tuple[float, Sequence[int]]]) -> Matrix:
    """Bytes of the distinct variables of each [i, j).

    A use at p whose previous one is at q is the first within [i, j) for q < i <= p < j: a
    rectangle of the matrix, entered by its corners and filled by two cumulative sums.
    """
    corners = np.zeros((n + 2, n + 2))
    for size, positions in variables:
        previous = -1
        for position in positions:
            corners[previous + 1, position + 1] += size
            corners[position + 1, position + 1] -= size
            previous = position
    return corners.cumsum(axis=0).cumsum(axis=1)[: n + 1, : n + 1]


def _only_stages(matrix: Matrix) -> Matrix:
    """Infinity where [i, j) is empty."""
    return np.where(np.triu(np.ones_like(matrix), k=1) > 0, matrix, np.inf)


def _least_maximum(loads: Sequence[Matrix]) -> float:
    """The least greatest load over all ways to cut [0, n) into one stage for each matrix."""
    best = loads[0][0]  # best[j]: of nodes [0, j) in the stages so far
    for load in loads[1:]:
        best = np.maximum(best[:, None], load).min(axis=0)
    return float(best[-1])


def _least_sum(
    allowed: Sequence[NDArray[np.bool_]], loads: Sequence[Matrix], crossing: Matrix
) -> list[int]:
    """Among the allowed stages, the cuts with the fewest bytes, then the least squared loads."""
    size = len(crossing)
    columns = np.arange(size)
    sent = np.where(allowed[0][0], 0.0, np.inf)
    squares = np.where(allowed[0][0], loads[0][0] ** 2, np.inf)
    choices = []
    for ok, load in zip(allowed[1:], loads[1:], strict=True):
        bytes_ = np.where(ok, (sent + crossing)[:, None], np.inf)
        squared = np.where(ok, squares[:, None] + np.where(ok, load, 0) ** 2, np.inf)
        fewest = bytes_.min(axis=0)
        squared = np.where(bytes_ == fewest[None, :], squared, np.inf)
        choice = squared.argmin(axis=0)
        choices.append(choice)
        sent, squares = fewest, squared[choice, columns]
    cuts: list[int] = []
    end = size - 1
    for choice in reversed(choices):
        end = int(choice[end])
        cuts.insert(0, end)
    return cuts
