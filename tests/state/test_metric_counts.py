"""What ranks have counted, on other numbers of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from ktrainer.state.metric_counts import MetricCounts

EVERY: list[list[Any]] = [
    [6, 2, {"a": 1.0, "b": None}],
    [5, 1, {"a": 4.0, "b": None}],
    [7, 9, {"a": 100.0, "b": 1.0}],
]


def test_of_one_rank() -> None:
    counted = MetricCounts()
    counted.take_over(EVERY, [1], [0, 1])
    assert (counted.examples, counted.last, counted.logs["a"]) == (5, 1, 4.0)


@pytest.mark.parametrize("sources", [[0, 1], []])
def test_sums_and_means_of_several(sources: list[int]) -> None:
    """A rank that counts nothing has the logs too: all ranks must have the same."""
    counted = MetricCounts()
    counted.take_over(EVERY, sources, [0, 1])
    assert (counted.examples, counted.last) == ((11, 3) if sources else (0, 0))
    assert counted.logs["a"] == 2.0
    assert counted.logs["b"] is None


def test_of_a_rank_whose_logs_are_unknown() -> None:
    counted = MetricCounts()
    counted.take_over([EVERY[0], [5, 1, None]], [1], [0, 1])
    assert (counted.examples, counted.last, counted.logs["a"]) == (5, 1, 1.0)
