"""Loops of the user's own give the numbers of one process, under every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist.small import group_mode
from tests.loops.cases import CASES, Outcome, largest_difference, outcomes
from tests.tf_distribute.running import under

NAMES = list(CASES)
STRATEGIES = {
    "mirrored": ["regularized", "adversarial", "in_functions"],
    "central_storage": ["clipped", "looked_up"],
    "multi_worker_mirrored": ["looked_up", "in_functions"],
    "one_device": ["in_branches"],
    "default": ["regularized"],
}
_truth: dict[str, Outcome] = {}


def check(ranks: Callable[..., Any], names: list[str], by_rank: list[list[Outcome]]) -> None:
    missing = [name for name in names if name not in _truth]
    if missing:
        (found,) = under(ranks, "local", outcomes, "local", missing)
        _truth.update(zip(missing, found, strict=True))
    gaps = {
        name: max(largest_difference(ours[i], _truth[name]) for ours in by_rank)
        for i, name in enumerate(names)
    }
    print({name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert max(gaps.values()) < 1e-12, gaps


@pytest.mark.quick("2-mpi")
@pytest.mark.parametrize(
    ("size", "engine", "names"),
    [
        (1, "mpi", ["in_branches"]),
        (2, "mpi", NAMES),
        (3, "mpi", ["clipped", "adversarial"]),
        (4, "mpi", ["looked_up"]),
        pytest.param(3, "horovod", ["regularized", "looked_up"], marks=pytest.mark.horovod),
    ],
    ids=["1-mpi", "2-mpi", "3-mpi", "4-mpi", "3-horovod"],
)
def test_data_parallel(ranks: Callable[..., Any], size: int, engine: str, names: list[str]) -> None:
    group = ranks(size, group_mode(engine)) if engine == "horovod" else ranks(size)
    words = {"backend__engine": engine}
    check(ranks, names, group.run(outcomes, "data_parallel", names, deadline=200, **words))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(ranks: Callable[..., Any], strategy: str) -> None:
    devices = None if strategy in ("one_device", "default") else 2
    names = STRATEGIES[strategy]
    check(ranks, names, under(ranks, strategy, outcomes, strategy, names, devices, deadline=200))
