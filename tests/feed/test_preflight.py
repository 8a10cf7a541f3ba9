"""What ranks must agree on, before step 1 and while training.

Nothing here imports TensorFlow: the ranks start at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ktrainer import preflight, world
from ktrainer.errors import DivergenceError
from ktrainer.world import SingleWorld
from tests.dist.harness import PerRank, Ranks

Group = Callable[..., Ranks]
FACTS: dict[str, Any] = {
    "config": {"seed": 0, "trainer": {"epochs": 3}},
    "model_facts": {"class": "Sequential", "layer 0": "Dense 12"},
    "data_facts": {"training/first batch/x": "aa"},
    "versions": {"tensorflow": "2.21.0"},
}


def _agree(facts: dict[str, Any]) -> None:
    preflight.check_agreement(world.current(), **facts)


def _message(ranks: Group, size: int, *others: dict[str, Any]) -> str:
    """What each rank says, all the same, when the last ranks have other facts."""
    facts = [FACTS] * (size - len(others)) + [FACTS | other for other in others]
    outcomes = ranks(size).outcomes(_agree, PerRank(facts))
    assert all(isinstance(o.error, DivergenceError) for o in outcomes), outcomes
    assert len({str(o.error) for o in outcomes}) == 1
    return str(outcomes[0].error)


def test_equal_facts_pass(ranks: Group) -> None:
    ranks(2).run(_agree, FACTS)
    preflight.check_agreement(SingleWorld(), **FACTS)


def test_what_differs_is_named(ranks: Group) -> None:
    text = _message(ranks, 3, {"config": {"seed": 1, "trainer": {"epochs": 3}}})
    assert "config seed: ranks 0, 1: 0; rank 2: 1" in text
    text = _message(ranks, 2, {"config": {"seed": 0, "trainer": {"epochs": 4}}})
    assert "config trainer.epochs: rank 0: 3; rank 1: 4" in text
    assert "same configuration" in text
    text = _message(ranks, 2, {"data_facts": {"training/first batch/x": "bb"}})
    assert "data training/first batch/x: rank 0: aa; rank 1: bb" in text
    assert "seed" in text
    text = _message(ranks, 2, {"versions": {"tensorflow": "2.20.0"}, "model_facts": {}})
    assert "version tensorflow: rank 0: 2.21.0; rank 1: 2.20.0" in text
    assert "model layer 0: rank 0: Dense 12; rank 1: missing" in text
    assert text.index("tensorflow") < text.index("layer 0")


def _audit(changed: list[str]) -> None:
    arrays = {
        "dense/kernel": np.ones((3, 4), np.float32),
        "dense/bias": np.zeros(4, ml_dtypes.bfloat16),
        "count": np.int64(3),
        "empty": np.zeros((0, 3)),
        "list": [1.0, 2.0],
    }
    for name in changed:
        arrays[name] = np.asarray(arrays[name]) + np.asarray(1, np.asarray(arrays[name]).dtype)
    preflight.audit(world.current(), arrays)


def test_the_audit_names_the_first_array_that_differs(ranks: Group) -> None:
    ranks(3).run(_audit, [])
    changed = PerRank([[], ["count", "dense/bias"], []])
    for outcome in ranks(3).outcomes(_audit, changed):
        assert isinstance(outcome.error, DivergenceError)
        assert "'dense/bias' is not the same on all ranks: ranks 0, 2: " in str(outcome.error)
        assert "2 of 5 arrays differ" in str(outcome.error)


def _audit_names(names: list[str]) -> None:
    preflight.audit(world.current(), {name: np.ones(3) for name in names})


def test_the_audit_of_other_names(ranks: Group) -> None:
    for outcome in ranks(2).outcomes(_audit_names, PerRank([["a", "b"], ["a"]])):
        assert "'b' is not the same on all ranks: rank 0: float64[3]" in str(outcome.error)
        assert "rank 1: missing" in str(outcome.error)
    for outcome in ranks(2).outcomes(_audit_names, PerRank([["a", "b"], ["b", "a"]])):
        assert "different orders" in str(outcome.error)


def _audit_seconds() -> float:
    arrays = {"weights": np.ones(2_900_000, np.float32)}
    preflight.audit(world.current(), arrays)
    start = time.thread_time()
    preflight.audit(world.current(), arrays)
    return time.thread_time() - start


def test_an_audit_of_12_mb_is_fast(ranks: Group) -> None:
    assert max(ranks(2).run(_audit_seconds)) < 0.25
