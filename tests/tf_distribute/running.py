"""Trainings under strategies, in the processes of the pool."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from tests.contracts import running
from tests.dist.cases import Outcome, several
from tests.dist.harness import leaks

DEVICES = 4  # logical CPU devices of each process that runs strategies
ONE_PROCESS = "strategies"  # modes of the pool: processes that are like that for good
CLUSTER = "cluster"  # such a group is never paused: its members listen for one another


def make_devices(count: int = DEVICES) -> None:
    """Before the first task uses TensorFlow: the number of devices cannot change later."""
    from ktrainer.backends.tf_distribute.strategies import make_devices
    from ktrainer.strategy_plan import StrategyPlan

    make_devices(StrategyPlan("mirrored", (), 1, count))


def cases_under(
    strategy: str, devices: int | None, chosen: list[tuple[str, str]], floatx: str, **more: Any
) -> list[Outcome]:
    """Run cases of `tests.dist.cases` under a strategy."""
    make_devices()
    words = {"backend__strategy": strategy, **more}
    if devices is not None:
        words["backend__devices"] = devices
    try:
        return several(chosen, floatx, backend="tf_distribute", **words)
    finally:
        if strategy == "multi_worker_mirrored":
            leaks.expect_ports()


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
