"""Comparisons of trainings, each with its bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.contracts.running import Outcome, largest_difference

# Relative, in float64: sums in another order differ by about 1e-13 after a few updates, and an
# example that is counted twice, or a float32 on the way, by 1e-8 or more.
WEIGHTS, LOGS = 1e-10, 1e-9


def same_numbers(ours: dict[str, Outcome], truth: dict[str, Outcome]) -> float:
    """Assert that weights and logs are the same but for rounding in float64; the largest relative
    difference of a weight."""
    largest = 0.0
    for name, expected in truth.items():
        difference, variable = largest_difference(ours[name].weights, expected.weights)
        assert difference <= WEIGHTS, f"{name}: {variable} differs by {difference:.1e}"
        largest = max(largest, difference)
        same_logs(ours[name], expected, name)
    return largest


def same_logs(ours: Outcome, truth: Outcome, name: str) -> None:
    """Assert that History is the same but for rounding in float64."""
    assert list(ours.history) == list(truth.history), name
    for key, values in truth.history.items():
        np.testing.assert_allclose(
            ours.history[key], values, rtol=LOGS, atol=1e-12, err_msg=f"{name}: {key}"
        )


def same_numbers_in_stages(ranks: Sequence[dict[str, Outcome]], truth: dict[str, Outcome]) -> float:
    """`same_numbers` of models of which each rank holds some variables."""
    largest = 0.0
    for name, expected in truth.items():
        outcomes = [rank[name] for rank in ranks]
        for part in ("weights", "slots"):
            held = [getattr(outcome, part) for outcome in outcomes]
            for (path, value), *every in zip(getattr(expected, part), *held, strict=True):
                here = [mine for mine in every if mine[1].size or not value.size]
                assert here, f"{name}: no rank has {path}"
                difference, _ = largest_difference(here, [(path, value)] * len(here))
                assert difference <= WEIGHTS, f"{name}: {path} differs by {difference:.1e}"
                largest = max(largest, difference)
        for outcome in outcomes:
            same_logs(outcome, expected, name)
    return largest


def error_of_change(
    ours: Outcome | Sequence[Outcome], truth: Outcome, start: Sequence[np.ndarray]
) -> float:
    """The error of what training has added to the weights, relative to that, in norm; of the
    variable where it is largest. Weights themselves would hide it: they change little.

    Args:
        ours: of one rank, or of all stages.
        truth: in float64.
        start: the weights before.
    """
    held = [outcome.weights for outcome in ([ours] if isinstance(ours, Outcome) else ours)]
    largest = 0.0
    for (_, end), begin, *every in zip(truth.weights, start, *held, strict=True):
        for _, mine in every:
            if mine.size:
                error = np.linalg.norm(np.float64(mine) - end) / np.linalg.norm(end - begin)
                largest = max(largest, float(error))
    return largest
