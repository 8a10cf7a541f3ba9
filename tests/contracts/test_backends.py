"""Every model of the zoo under `data_parallel` gives the numbers of `local`: on 2 ranks, and some
on 3, and in two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import Outcome, digest, largest_difference, local, train
from tests.contracts.zoo import ZOO

EXACT = [name for name, case in ZOO.items() if case.exact]
NOISY = [name for name, case in ZOO.items() if not case.exact]
# A pipeline refuses steps of a model's own, averages of weights, and losses that read weights. What
# sees whole batches draws and normalises as one process does.
REFUSED = ("vae", "gan", "averaged_weights", "own_loss_and_metrics", "nested_logs")
IN_STAGES = [name for name in ZOO if name not in REFUSED][1::2]
WEIGHTS, LOGS = 1e-10, 1e-9  # relative, in float64: above round-off, below any error


def compare(name: str, expected: Outcome, ours: Outcome) -> float:
    """Check one model; the largest relative difference of its weights."""
    difference, variable = largest_difference(ours.weights, expected.weights)
    assert difference <= WEIGHTS, f"{name}: {variable} differs by {difference:.1e}"
    assert list(ours.history) == list(expected.history), name
    assert ours.epochs == expected.epochs
    for key, values in expected.history.items():
        np.testing.assert_allclose(
            ours.history[key], values, rtol=LOGS, atol=1e-12, err_msg=f"{name}: {key}"
        )
    return difference


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "chosen"),
    [(2, EXACT[::2]), (2, EXACT[1::2]), (3, EXACT[1::6])],
    ids=["2-even", "2-odd", "3"],
)
def test_models_equal_one_process(ranks: Callable[..., Any], size: int, chosen: list[str]) -> None:
    by_rank = ranks(size).run(train, chosen, name="data_parallel", engine="mpi", deadline=280)
    largest = {}
    for name in chosen:
        ours = [rank[name][0] for rank in by_rank]
        assert len({digest(outcome) for outcome in ours}) == 1, f"{name}: ranks differ"
        assert all(outcome.history == ours[0].history for outcome in ours), name
        largest[name] = compare(name, local(name), ours[0])
    print({name: f"{difference:.1e}" for name, difference in largest.items()})


@pytest.mark.exhaustive
def test_noisy_models_are_equal_on_all_ranks_and_in_every_run(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(2).run(train, NOISY, times=2, name="data_parallel", engine="mpi", deadline=200)
    for name in NOISY:
        outcomes = [outcome for rank in by_rank for outcome in rank[name]]
        assert len({digest(outcome) for outcome in outcomes}) == 1, name
        assert all(outcome.history == outcomes[0].history for outcome in outcomes), name
        values = [value for values in outcomes[0].history.values() for value in values]
        assert np.isfinite(values).all(), name


@pytest.mark.exhaustive
def test_models_in_two_stages_equal_one_process(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(2).run(train, IN_STAGES, name="pipeline", partitions=2, deadline=280)
    for name in IN_STAGES:
        expected, ours = local(name), [rank[name][0] for rank in by_rank]
        for part in ("weights", "slots"):
            truth, held = getattr(expected, part), [getattr(rank, part) for rank in ours]
            for (path, value), *both in zip(truth, *held, strict=True):
                here = [mine for mine in both if mine[1].size or not value.size]
                assert here, f"{name}: no rank has {path}"
                difference, _ = largest_difference(here, [(path, value)] * len(here))
                assert difference <= WEIGHTS, f"{name}: {path} differs by {difference:.1e}"
        assert ours[0].history == ours[1].history
        for key, numbers in expected.history.items():
            np.testing.assert_allclose(ours[0].history[key], numbers, LOGS, 1e-12, err_msg=key)
