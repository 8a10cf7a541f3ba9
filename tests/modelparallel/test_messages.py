"""Ranks, groups and host messages, and `ktrainer.dataparallel` over the replicas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dist.harness import Ranks
from tests.modelparallel import rank_functions

GROUPS = {"cluster": [[0, 1], [2, 3]], "spread": [[0, 2], [1, 3]]}


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", GROUPS)
def test_numbers_and_messages(ranks: Callable[..., Ranks], placement: str) -> None:
    models, stages = GROUPS[placement], GROUPS["spread" if placement == "cluster" else "cluster"]
    for rank, found in enumerate(ranks(4).run(rank_functions.numbers, placement)):
        mine = next(group for group in models if rank in group)
        copies = next(group for group in stages if rank in group)
        assert "more than once" in found["again"]
        assert found["rank"] == found["local"] == (rank, 4)
        assert found["mp"] == (mine.index(rank), 2) * 2
        assert found["dp"] == (copies.index(rank), 2)
        assert (found["mp_group"], found["dp_group"]) == (mine, copies)
        assert found["got"] == next(other for other in mine if other != rank)
        assert found["root"] == [0, mine[0], copies[0]]
        assert found["every"] == [[0, 1, 2, 3], mine, copies]
        assert "no other process with WORLD_RANK" in found["self"]
        assert "none of smp.CommGroup.WORLD" in found["group"]
        assert "none of smp.RankType.WORLD_RANK" in found["kind"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", GROUPS)
def test_data_parallelism_is_over_replicas(ranks: Callable[..., Ranks], placement: str) -> None:
    for rank, found in enumerate(ranks(4).run(rank_functions.over_replicas, placement)):
        group, numbers, mean, total, root, again, sets = found
        assert numbers == (group.index(rank), 2)
        assert (mean, total, root) == (sum(group) / 2, sum(group), group[0])
        assert "already initialised" in again
        assert "process sets are not available" in sets


@pytest.mark.exhaustive
def test_a_message_that_is_not_sent_is_named_within_the_deadline(
    ranks: Callable[..., Ranks],
) -> None:
    for rank, said in enumerate(ranks(2, "late messages").run(rank_functions.waits)):
        assert "DeadlineExceeded" in said
        assert f"rank {1 - rank}" in said
