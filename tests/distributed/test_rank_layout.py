"""Which rank has which partition of which replica."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktrainer.distributed.rank_layout import Layout

layouts = st.builds(
    Layout, st.integers(1, 9), st.integers(1, 9), st.sampled_from(["cluster", "spread"])
)


def test_eight_ranks_two_partitions() -> None:
    cluster, spread = Layout(2, 4, "cluster"), Layout(2, 4, "spread")
    assert cluster.size == spread.size == 8
    assert [cluster.model_ranks(r) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [spread.model_ranks(r) for r in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [cluster.copy_ranks(p) for p in range(2)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [spread.copy_ranks(p) for p in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Layout(2, 4) == cluster


def test_three_partitions_two_replicas() -> None:
    cluster, spread = Layout(3, 2, "cluster"), Layout(3, 2, "spread")
    assert [cluster.partition_of(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [cluster.replica_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [spread.partition_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [spread.replica_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


@given(layouts)
def test_there_and_back(layout: Layout) -> None:
    for rank in range(layout.size):
        partition, replica = layout.partition_of(rank), layout.replica_of(rank)
        assert layout.rank_of(partition, replica) == rank
        assert layout.model_ranks(replica)[partition] == rank
        assert layout.copy_ranks(partition)[replica] == rank


@given(layouts)
def test_each_rank_is_in_one_group_of_either_kind(layout: Layout) -> None:
    everyone = list(range(layout.size))
    models = [layout.model_ranks(replica) for replica in range(layout.replicas)]
    copies = [layout.copy_ranks(partition) for partition in range(layout.partitions)]
    for groups in (models, copies):
        assert sorted(chain.from_iterable(groups)) == everyone
    in_a_row = models if layout.placement == "cluster" else copies
    assert list(chain.from_iterable(in_a_row)) == everyone


@pytest.mark.parametrize("given", [(0, 1), (1, 0), (2, -1), (1, 1, "random")])
def test_what_is_no_layout(given: Any) -> None:
    with pytest.raises(ValueError):
        Layout(*given)


def test_who_is_not_there() -> None:
    layout = Layout(2, 3)
    for call in (
        lambda: layout.rank_of(2, 0),
        lambda: layout.rank_of(0, 3),
        lambda: layout.partition_of(6),
        lambda: layout.replica_of(-1),
        lambda: layout.model_ranks(3),
        lambda: layout.copy_ranks(2),
    ):
        with pytest.raises(IndexError, match="there is no"):
            call()
