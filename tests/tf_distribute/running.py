"""Trainings under strategies, in the processes of the pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.contracts import running
from tests.dist.cases import Outcome, several
from tests.dist.harness import leaks

DEVICES = 4  # logical CPU devices of each process that runs strategies
ONE_PROCESS = "strategies"  # modes of the pool: processes that are like that for good
CLUSTER = "cluster"  # such a group is never paused: its members listen for one another


def under(
    ranks: Callable[..., Any],
    strategy: str,
    function: Callable[..., Any],
    *args: Any,
    size: int = 2,
    devices: int = 1,
    deadline: float = 120.0,
    **words: Any,
) -> list[Any]:
    """What `function` returns in the processes of a strategy or backend, of which some have one.

    Args:
        size: of those that have several.
        devices: of each process of several workers.
    """
    if strategy == "multi_worker_mirrored":
        group = ranks(size, f"{CLUSTER} {devices}")
        return group.run(_with_ports, function, *args, deadline=deadline, **words)
    group = ranks(size) if strategy in ("data_parallel", "pipeline") else ranks(1, ONE_PROCESS)
    return group.run(function, *args, deadline=deadline, **words)


def _with_ports(function: Callable[..., Any], *args: Any, **words: Any) -> Any:
    try:
        return function(*args, **words)
    finally:
        leaks.expect_ports()


def close(
    ours: Iterable[Any], truth: Iterable[Any], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Assert that arrays are those of one process; by default to float32."""
    for mine, value in zip(ours, truth, strict=True):
        np.testing.assert_allclose(mine, value, rtol=rtol, atol=atol)


def make_devices(count: int = DEVICES) -> None:
    """Before the first task uses TensorFlow: the number of devices cannot change later."""
    from ktrainer.backends.tf_distribute.strategies import make_devices
    from ktrainer.plan.strategy_plan import StrategyPlan

    make_devices(StrategyPlan("mirrored", (), 1, count))


def cases_under(
    strategy: str, devices: int | None, chosen: list[tuple[str, str]], floatx: str, **more: Any
) -> list[Outcome]:
    """Run cases of `tests.dist.cases` under a strategy."""
    make_devices()
    words = {"backend__strategy": strategy, **more}
    if devices is not None:
        words["backend__devices"] = devices
    return several(chosen, floatx, backend="tf_distribute", **words)


def zoo_under(
    strategy: str, devices: int, names: Iterable[str]
) -> dict[str, list[running.Outcome]]:
    """Train models of the zoo under a strategy, in float64."""
    make_devices()
    return running.train(names, name="tf_distribute", strategy=strategy, devices=devices)


@functools.cache
def expected(case: str, optimizer: str, floatx: str = "float64", **settings: Any) -> Outcome:
    """What one process gives; each case once a session."""
    return several([(case, optimizer)], floatx, backend="local", **settings)[0]
