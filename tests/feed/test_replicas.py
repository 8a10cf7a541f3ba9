"""Several ranks that hold one model together get one share; replicas share the data out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ktrainer import world
from ktrainer.config import DataConfig
from ktrainer.errors import DivergenceError, PeerLost
from ktrainer.feed import ShuffleOrder, make_feed
from ktrainer.feed.make import Feed
from ktrainer.world import World
from ktrainer.world.layout import Layout
from tests.dist.harness import Ranks
from tests.feed.test_python_data import Numbers
from tests.feed.test_ranks import (
    generator,
    hinted,
    lines,
    ordered,
    seeded,
    sentences,
    unknown_length,
)
from tests.feed.worlds import Place, flat, numbered, rows

Group = Callable[..., Ranks]
EVERYTHING = list(range(241))
GRIDS = [Layout(2, 2, "cluster"), Layout(2, 2, "spread"), Layout(3, 1)]


@contextmanager
def shared_by(layout: Layout) -> Iterator[World]:
    """All ranks, sharing the data by the replicas of `layout`."""
    whole: Any = world.current()
    here = whole.group(range(whole.size), "all ranks")
    here.share_data(layout.replica_of(whole.rank), layout.replicas)
    try:
        yield here
    finally:
        here.close()


@contextmanager
def opened(make: Callable[[World], Any], layout: Layout, **config: Any) -> Iterator[Feed]:
    with shared_by(layout) as here:
        settings = DataConfig(**config)
        made = make_feed(
            make(here), world=here, config=settings, training=True, order=ShuffleOrder()
        )
        with closing(made):
            yield made


def watch(make: Any, layout: Layout, *args: Any, **config: Any) -> dict[str, Any]:
    """Two epochs of a feed on this rank."""
    with opened(partial(make, *args), layout, **config) as made:
        facts = made.fingerprint()
        epochs = [list(made.epoch(epoch)) for epoch in range(2)]
        return {
            "facts": facts,
            "rows": [rows(shares) for shares in epochs],
            "blank": [[share.blank for share in shares] for shares in epochs],
            "totals": [[share.global_examples for share in shares] for shares in epochs],
            "batches": made.num_batches,
        }


def check(results: list[dict[str, Any]], layout: Layout, wanted: list[int]) -> None:
    """Ranks of a replica have equal shares; all replicas' together are every row, once."""
    for key in ("facts", "totals", "batches"):
        assert all(result[key] == results[0][key] for result in results)
    for replica in range(layout.replicas):
        first, *others = [results[rank] for rank in layout.model_ranks(replica)]
        assert all(other == first for other in others)
    each = [results[rank] for rank in layout.copy_ranks(0)]
    for epoch in range(2):
        assert sorted(flat(flat(r["rows"][epoch]) for r in each)) == sorted(wanted)
        for step, total in enumerate(each[0]["totals"][epoch]):
            assert sum(len(r["rows"][epoch][step]) for r in each) == total


def arrays(here: World) -> Any:
    return numbered(241)


def by_name(name: str, here: World) -> Any:
    """What the tests of ranks train on; generators as functions, called for every epoch."""
    data = {
        "ordered": ordered,
        "unknown_length": unknown_length,
        "seeded": seeded,
        "generator": lambda: generator,
        "sentences": lambda: sentences,
        "hinted": hinted,
        "Numbers": Numbers,
    }
    return data[name]()


def files(folder: str, here: World) -> tf.data.Dataset:
    return lines(folder)


@pytest.mark.parametrize("layout", GRIDS, ids=str)
def test_global_batches(ranks: Group, layout: Layout) -> None:
    group = ranks(layout.size)
    check(group.run(watch, arrays, layout), layout, EVERYTHING)
    for name in ("ordered", "unknown_length", "seeded", "generator", "Numbers"):
        results = group.run(watch, by_name, layout, name, deadline=120)
        check(results, layout, list(range(50)) if name == "Numbers" else EVERYTHING)
        if name != "Numbers":
            assert results[0]["totals"][0] == [32] * 7 + [17]


@pytest.mark.parametrize("layout", GRIDS, ids=str)
def test_pipelines_dealt_out(ranks: Group, layout: Layout, tmp_path: Path) -> None:
    group = ranks(layout.size)
    for file in range(5):
        text = "\n".join(str(file * 10 + line) for line in range(10))
        (tmp_path / f"{file}.txt").write_text(text)
    for batch in ("global", "per_worker"):
        for name in ("ordered", "unknown_length", "hinted"):
            results = group.run(watch, by_name, layout, name, batch=batch, shard="element")
            check(results, layout, EVERYTHING)
        results = group.run(watch, files, layout, str(tmp_path), batch=batch, shard="file")
        check(results, layout, list(range(50)))


@pytest.mark.parametrize("rank", range(4))
def test_arrays_per_worker_are_a_batch_a_replica(rank: int) -> None:
    place = Place(rank, 4)
    place.share_data(rank // 2, 2)
    config = DataConfig(batch="per_worker", batch_size=8, shuffle=False)
    made = make_feed(numbered(40), world=place, config=config, training=True, order=ShuffleOrder())
    shares = list(made.epoch(0))
    assert [share.global_examples for share in shares] == [16, 16, 8]
    mine = 8 * (rank // 2)
    assert rows(shares)[:2] == [list(range(mine, mine + 8)), list(range(mine + 16, mine + 24))]


def of_replica(counts: list[int], here: World) -> tf.data.Dataset:
    mine = tf.data.Dataset.from_tensor_slices(numbered(241)).shard(here.replicas, here.replica)
    return mine.take(counts[here.replica]).batch(8)


def generator_of_replica(counts: list[int], here: World) -> Any:
    x, y = numbered(241)

    def batches() -> Iterator[Any]:
        for row in range(here.replica, 2 * counts[here.replica], 2):
            yield x[row : row + 1], y[row : row + 1]

    return batches


def test_own_batches_of_each_replica_count_once(ranks: Group) -> None:
    for layout in GRIDS[:2]:
        for counts in ([80, 56], [9, 0]):
            mine = [list(range(replica, 241, 2))[: counts[replica]] for replica in range(2)]
            for make in (of_replica, generator_of_replica):
                results = ranks(4).run(watch, make, layout, counts, batch="per_worker")
                check(results, layout, flat(mine))
                for rank, result in enumerate(results):
                    assert flat(result["rows"][1]) == mine[layout.replica_of(rank)]
    one = ranks(3).run(watch, by_name, GRIDS[2], "ordered", batch="per_worker")
    check(one, GRIDS[2], EVERYTHING)


def of_rank(here: World) -> tf.data.Dataset:
    """As under data parallelism: a script that shards by rank."""
    whole = tf.data.Dataset.from_tensor_slices(numbered(240))
    return whole.shard(here.size, here.rank).batch(8)


def more_by_rank(here: World) -> Any:
    x = np.ones((4, 3), np.float32)
    return lambda: ((x, np.zeros(4)) for _ in range(2 + here.rank // 2))


def consume(make: Any, layout: Layout, **config: Any) -> None:
    with opened(make, layout, **config) as made:
        list(made.epoch(0))


def test_ranks_of_a_replica_with_other_data_are_found(ranks: Group) -> None:
    cluster, spread, one = GRIDS
    for outcome in ranks(4).outcomes(consume, of_rank, cluster, batch="per_worker"):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "the next batch of replica 0 differs in x: ranks 1, 3 got" in str(outcome.error)
        assert "world.current().replica" in str(outcome.error)
    for outcome in ranks(4).outcomes(consume, more_by_rank, spread, batch="per_worker"):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "replica 0 differs in having a batch: ranks 2, 3" in str(outcome.error)
    for outcome in ranks(3).outcomes(consume, of_rank, one, batch="per_worker"):
        assert isinstance(outcome.error, DivergenceError), outcome
        assert "All ranks hold one copy of the model together" in str(outcome.error)
        assert "per_worker" not in str(outcome.error)


def fails_on_the_last_rank(here: World) -> Any:
    def batches() -> Iterator[Any]:
        yield from generator(96)
        if here.rank == here.size - 1:
            raise OSError("disk gone")

    return batches


@pytest.mark.parametrize("batch", ["global", "per_worker"])
def test_an_error_in_one_ranks_pipeline(ranks: Group, batch: str) -> None:
    *well, failed = ranks(4).outcomes(consume, fails_on_the_last_rank, GRIDS[0], batch=batch)
    assert isinstance(failed.error, OSError)
    for outcome in well:
        assert isinstance(outcome.error, PeerLost), outcome
        assert "rank 3" in str(outcome.error)
