"""Gradient collectives over groups: each sums over its own ranks, whatever the others do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.distributed.collectives import GradientCollectives, InOrder
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import DeadlineExceeded
from tests.dist.small import ENGINES, group_mode
from tests.distributed.collectives import SECONDS

GRIDS = [Layout(2, 2, "cluster"), Layout(2, 2, "spread"), Layout(1, 4)]


def _mpi_collectives(layout: Layout) -> tuple[GradientCollectives, Any]:
    from ktrainer.distributed.mpi_gradients import MpiGradients

    whole: Any = distributed.current_world()
    partition = layout.partition_of(whole.rank)
    group = whole.group(layout.copy_ranks(partition), f"the copies of partition {partition}")
    return MpiGradients(group), group


def _collectives(engine: str, layout: Layout) -> tuple[GradientCollectives, Any]:
    """Collectives over the copies of this rank's partition, and what else must be closed."""
    if engine == "mpi":
        return _mpi_collectives(layout)
    from ktrainer.distributed.horovod_gradients import HorovodGradients

    whole = distributed.current_world()
    groups = [layout.copy_ranks(partition) for partition in range(layout.partitions)]
    mine = groups[layout.partition_of(whole.rank)]
    return HorovodGradients(whole, ranks=mine, all_groups=groups), distributed.SingleWorld()


def _gradients(rank: int, count: int) -> list[Any]:
    """As many dense gradients as asked for, and a sparse one."""
    dense = [tf.fill([3, k + 1], float(10**k * (rank + 1))) for k in range(count)]
    rows = tf.IndexedSlices(tf.fill([1, 2], float(rank + 1)), tf.constant([rank]), (8, 2))
    return [*dense, rows]


def _sums(engine: str, layout: Layout, eager: bool) -> tuple[int, list[np.ndarray], np.ndarray]:
    rank = distributed.current_world().rank
    partition = layout.partition_of(rank)
    collectives, group = _collectives(engine, layout)

    def step() -> tuple[list[Any], tf.Tensor]:
        order = InOrder()
        total = collectives.sum(tf.fill([2], float(rank)), order)
        # Partitions have different variables, in different numbers.
        reduced = collectives.reduce(
            _gradients(rank, 1 + 2 * partition), tf.constant(0.5, tf.float64), order
        )
        return [tf.convert_to_tensor(gradient) for gradient in reduced], total

    step = step if eager else tf.function(step)
    with closing(group), closing(collectives):
        for _ in range(1 + 3 * partition):  # nor need they take equally many steps
            reduced, total = step()
        return collectives.size, [gradient.numpy() for gradient in reduced], total.numpy()


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_over_the_group(ranks: Callable[..., Any], engine: str) -> None:
    group = ranks(4, group_mode(engine))
    # Back to the first: Horovod restarts for groups that it does not know, and once only.
    for k, layout in enumerate([*GRIDS, GRIDS[0]]):
        results = group.run(_sums, engine, layout, eager=k == 1)
        for rank, (size, reduced, total) in enumerate(results):
            partition = layout.partition_of(rank)
            members = layout.copy_ranks(partition)
            assert size == len(members)
            np.testing.assert_array_equal(total, [sum(members)] * 2)
            each = [_gradients(member, 1 + 2 * partition) for member in members]
            for got, parts in zip(reduced, zip(*each, strict=True), strict=True):
                expected = sum(0.5 * tf.convert_to_tensor(part).numpy() for part in parts)
                np.testing.assert_array_equal(got, expected)


def _late(layout: Layout) -> None:
    whole: Any = distributed.current_world()
    collectives, _ = _mpi_collectives(layout)
    whole.step, whole.deadline = 7, 0.5 if whole.rank == 1 else SECONDS
    if whole.rank == 3:
        return
    try:
        collectives.sum(tf.zeros([2]), InOrder())
    except Exception as error:
        raise (collectives.failure(error) or error) from None


@pytest.mark.exhaustive
def test_collectives_that_wait_name_ranks_of_the_world(ranks: Callable[..., Any]) -> None:
    outcomes = ranks(4, "late").outcomes(_late, GRIDS[0])
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    error = outcomes[1].error
    assert isinstance(error, DeadlineExceeded), outcomes[1]
    assert (error.rank, error.step) == (1, 7)
    assert "among the copies of partition 1 (ranks 1, 3)" in str(error)


@pytest.mark.exhaustive
@pytest.mark.horovod
def test_groups_that_horovod_cannot_have(ranks: Callable[..., Any]) -> None:
    for mine, groups in ([[0], [[0], [1]]], [[0, 1], [[0], [1]]]):
        for outcome in ranks(2, "horovod").outcomes(_refused, mine, groups):
            assert isinstance(outcome.error, ValueError), outcome
            assert "one of the groups [[0], [1]]" in str(outcome.error)


def _refused(mine: list[int], groups: list[list[int]]) -> None:
    from ktrainer.distributed.horovod_gradients import HorovodGradients

    HorovodGradients(distributed.current_world(), ranks=mine, all_groups=groups)
