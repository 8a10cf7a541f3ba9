"""Gradient planes over groups: each sums over its own ranks, whatever the other groups do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ktrainer import world
from ktrainer.errors import DeadlineExceeded
from ktrainer.world.layout import Layout
from ktrainer.world.plane import GradientPlane, InOrder
from tests.dist.small import ENGINES, group_mode

GRIDS = [Layout(2, 2, "cluster"), Layout(2, 2, "spread"), Layout(1, 4)]


def _mpi_plane(layout: Layout) -> tuple[GradientPlane, Any]:
    from ktrainer.world.plane_mpi import MpiPlane

    whole: Any = world.current()
    partition = layout.partition_of(whole.rank)
    group = whole.group(layout.copy_ranks(partition), f"the copies of partition {partition}")
    return MpiPlane(group), group


def _plane(engine: str, layout: Layout) -> tuple[GradientPlane, Any]:
    """A plane over the copies of this rank's partition, and what else must be closed."""
    if engine == "mpi":
        return _mpi_plane(layout)
    from ktrainer.world.plane_horovod import HorovodPlane

    whole = world.current()
    groups = [layout.copy_ranks(partition) for partition in range(layout.partitions)]
    mine = groups[layout.partition_of(whole.rank)]
    return HorovodPlane(whole, ranks=mine, all_groups=groups), world.SingleWorld()


def _gradients(rank: int, count: int) -> list[Any]:
    """As many dense gradients as asked for, and a sparse one."""
    dense = [tf.fill([3, k + 1], float(10**k * (rank + 1))) for k in range(count)]
    rows = tf.IndexedSlices(tf.fill([1, 2], float(rank + 1)), tf.constant([rank]), (8, 2))
    return [*dense, rows]


def _sums(engine: str, layout: Layout, eager: bool) -> tuple[int, list[np.ndarray], np.ndarray]:
    rank = world.current().rank
    partition = layout.partition_of(rank)
    plane, group = _plane(engine, layout)

    def step() -> tuple[list[Any], tf.Tensor]:
        order = InOrder()
        total = plane.sum(tf.fill([2], float(rank)), order)
        # Partitions have different variables, in different numbers.
        reduced = plane.reduce(
            _gradients(rank, 1 + 2 * partition), tf.constant(0.5, tf.float64), order
        )
        return [tf.convert_to_tensor(gradient) for gradient in reduced], total

    step = step if eager else tf.function(step)
    with closing(group), closing(plane):
        for _ in range(1 + 3 * partition):  # nor need they take equally many steps
            reduced, total = step()
        return plane.size, [gradient.numpy() for gradient in reduced], total.numpy()


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_over_the_group(ranks: Callable[..., Any], engine: str) -> None:
    group = ranks(4, group_mode(engine))
    # Back to the first: Horovod starts anew for groups that it does not know, and once only.
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
    whole: Any = world.current()
    plane, _ = _mpi_plane(layout)
    whole.step, whole.deadline = 7, 0.5
    if whole.rank == 3:
        return
    try:
        plane.sum(tf.zeros([2]), InOrder())
    except Exception as error:
        raise (plane.failure(error) or error) from None


def test_a_plane_that_waits_names_ranks_of_the_world(ranks: Callable[..., Any]) -> None:
    outcomes = ranks(4).outcomes(_late, GRIDS[0])
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    error = outcomes[1].error
    assert isinstance(error, DeadlineExceeded), outcomes[1]
    assert (error.rank, error.step) == (1, 7)
    assert "among the copies of partition 1 (ranks 1, 3)" in str(error)


@pytest.mark.horovod
def test_groups_that_horovod_cannot_have(ranks: Callable[..., Any]) -> None:
    for mine, groups in ([[0], [[0], [1]]], [[0, 1], [[0], [1]]]):
        for outcome in ranks(2, "horovod").outcomes(_refused, mine, groups):
            assert isinstance(outcome.error, ValueError), outcome
            assert "one of the groups [[0], [1]]" in str(outcome.error)


def _refused(mine: list[int], groups: list[list[int]]) -> None:
    from ktrainer.world.plane_horovod import HorovodPlane

    HorovodPlane(world.current(), ranks=mine, all_groups=groups)
