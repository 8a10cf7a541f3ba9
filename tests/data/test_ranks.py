"""Real ranks: all rows once, the same steps everywhere, and no wait for a rank without data.

A layout says which ranks hold one model together: they get the same batches, and count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.config import Config, DataConfig
from ktrainer.data import Feed, ShuffleOrder, make_feed, order_of, rank_files
from ktrainer.data.rank_consistency import _explain
from ktrainer.distributed.rank_layout import Layout
from ktrainer.errors import DataError, DivergenceError, PeerLost
from tests.data.feeds import Place, flat, numbered, rows
from tests.data.rank_data import (
    arrays,
    empty,
    failing,
    files,
    generator,
    generator_of_replica,
    hinted,
    lines,
    loader_of_rank,
    more_by_rank,
    of_rank,
    of_replica,
    one_batch_less,
    ordered,
    pydataset,
    seeded,
    sentences,
    shorter_by_rank,
    shuffled_without_seed,
    unknown_length,
)
from tests.dist.harness import Ranks

Group = Callable[..., Ranks]
EVERYTHING = list(range(241))
TWO = Layout(1, 2)
CLUSTER, SPREAD, ONE = Layout(2, 2, "cluster"), Layout(2, 2, "spread"), Layout(3, 1)


@contextmanager
def opened(make: Callable[..., Any], layout: Layout, *args: Any, **config: Any) -> Iterator[Feed]:
    """A feed of this rank, which belongs to a replica of `layout`."""
    whole: Any = distributed.current_world()
    here = whole
    if layout.partitions > 1:
        here = whole.group(range(whole.size), "all ranks")
        here.assign_replica(layout.replica_of(whole.rank), layout.replicas)
    settings: dict[str, Any] = {"config": DataConfig(**config), "training": True}
    try:
        made = make_feed(make(here, *args), world=here, order=ShuffleOrder(), **settings)
        with closing(made):
            yield made
    finally:
        if here is not whole:
            here.close()


def watch(make: Any, layout: Layout, *args: Any, **config: Any) -> dict[str, Any]:
    """Two epochs of a feed on this rank."""
    with opened(make, layout, *args, **config) as made:
        facts = made.fingerprint()
        epochs = [list(made.epoch(epoch)) for epoch in range(2)]
        return {
            "facts": facts,
            "rows": [rows(epoch) for epoch in epochs],
            "padding": [[batch.is_padding for batch in epoch] for epoch in epochs],
            "totals": [[batch.global_examples for batch in epoch] for epoch in epochs],
            "batches": made.num_batches,
            "spec": [spec.shape.as_list() for spec in tf.nest.flatten(made.spec)],
        }


def facts_of(make: Any, layout: Layout, **config: Any) -> dict[str, str]:
    with opened(make, layout, **config) as made:
        return made.fingerprint()


def consume(make: Any, layout: Layout, **config: Any) -> None:
    with opened(make, layout, **config) as made:
        list(made.epoch(0))


def check(results: list[dict[str, Any]], layout: Layout, wanted: list[int]) -> None:
    """All ranks took the same steps; replicas together saw every row once an epoch."""
    for key in ("facts", "totals", "batches", "spec"):
        assert all(result[key] == results[0][key] for result in results)
    for replica in range(layout.replicas):
        first, *others = [results[rank] for rank in layout.model_ranks(replica)]
        assert all(other == first for other in others)
    each = [results[rank] for rank in layout.copy_ranks(0)]
    for epoch in range(2):
        totals = each[0]["totals"][epoch]
        assert sorted(flat(flat(r["rows"][epoch]) for r in each)) == sorted(wanted)
        assert sum(totals) == len(wanted)
        for step, total in enumerate(totals):
            assert sum(len(r["rows"][epoch][step]) for r in each) == total


@pytest.mark.quick("Layout(partitions=3, replicas=1, placement='cluster')")
@pytest.mark.parametrize("layout", [Layout(1, 3), CLUSTER, ONE], ids=str)
def test_global_batches(ranks: Group, layout: Layout) -> None:
    group = ranks(layout.size)
    for make in (arrays, ordered, unknown_length, seeded, generator, pydataset):
        results = group.run(watch, make, layout, deadline=120)
        check(results, layout, list(range(50)) if make is pydataset else EVERYTHING)
        if make is not pydataset:
            assert results[0]["totals"][0] == [32] * 7 + [17]
        if make not in (arrays, pydataset):
            assert results[0]["facts"]["first batch/rows"] == "32"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "whole", "own"),
    [
        (TWO, (ordered, unknown_length), (ordered, seeded, hinted)),
        (SPREAD, (seeded,), (unknown_length,)),
    ],
    ids=["two", "spread"],
)
def test_sharded_pipelines(
    ranks: Group, layout: Layout, whole: Sequence[Any], own: Sequence[Any], tmp_path: Path
) -> None:
    group = ranks(layout.size)
    for file in range(5):
        text = "\n".join(str(file * 10 + line) for line in range(10))
        (tmp_path / f"{file}.txt").write_text(text)
    for batch, makes in {"global": whole, "per_worker": own}.items():
        for make in makes:
            results = group.run(watch, make, layout, batch=batch, shard="element")
            check(results, layout, EVERYTHING)
            if (make, batch) == (ordered, "global"):
                assert results[0]["totals"][0][:6] == [32] * 6
        results = group.run(watch, lines, layout, str(tmp_path), batch=batch, shard="file")
        check(results, layout, list(range(50)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [TWO, CLUSTER], ids=str)
def test_batches_of_each_replica_count_once(ranks: Group, layout: Layout) -> None:
    for counts, make in (
        ([80, 56], of_replica),
        ([80, 56], generator_of_replica),
        ([50, 0], generator_of_replica),
        ([0, 1], of_replica),
    ):
        mine = [list(range(replica, 241, 2))[: counts[replica]] for replica in range(2)]
        results = ranks(layout.size).run(watch, make, layout, counts, batch="per_worker")
        check(results, layout, flat(mine))
        for rank, result in enumerate(results):
            assert flat(result["rows"][1]) == mine[layout.replica_of(rank)]
        if make is of_replica:
            assert results[0]["batches"] == -(-max(counts) // 8)


def test_data_of_other_lengths_or_of_one_replica(ranks: Group) -> None:
    uneven = ranks(2).run(watch, shorter_by_rank, TWO, batch="per_worker")
    check(uneven, TWO, EVERYTHING + EVERYTHING[:177])
    check(ranks(3).run(watch, ordered, ONE, batch="per_worker"), ONE, EVERYTHING)


@pytest.mark.parametrize("rank", range(4))
def test_arrays_per_worker_are_a_batch_a_replica(rank: int) -> None:
    place = Place(rank, 4)
    place.assign_replica(rank // 2, 2)
    config = DataConfig(batch="per_worker", batch_size=8, shuffle=False)
    made = make_feed(numbered(40), world=place, config=config, training=True, order=ShuffleOrder())
    local_batches = list(made.epoch(0))
    assert [batch.global_examples for batch in local_batches] == [16, 16, 8]
    mine = 8 * (rank // 2)
    wanted = [list(range(mine, mine + 8)), list(range(mine + 16, mine + 24))]
    assert rows(local_batches)[:2] == wanted


def _seed_of_the_order() -> list[int]:
    here = distributed.current_world()
    order = order_of(here, Config(seed=None))
    made = make_feed(numbered(20), world=here, config=DataConfig(), training=True, order=order)
    return made.order(0).tolist()  # type: ignore[attr-defined]


def test_arrays_without_a_seed_have_one_order(ranks: Group) -> None:
    one, two = ranks(2).run(_seed_of_the_order)
    assert one == two


def test_ranks_widen_their_spec_together(ranks: Group) -> None:
    for batch in ("global", "per_worker"):
        outcomes = ranks(2).outcomes(watch, sentences, TWO, batch=batch)
        if batch == "per_worker":
            assert [o.value["spec"] for o in outcomes] == [[[None, None], [None]]] * 2
        else:  # the third batch is another one on each rank
            assert all(isinstance(o.error, DivergenceError) for o in outcomes)


@pytest.mark.parametrize("shard", ["batch", "element"])
def test_an_unseeded_shuffle_is_in_the_facts(ranks: Group, shard: str) -> None:
    one, two = ranks(2).run(facts_of, shuffled_without_seed, TWO, shard=shard)
    assert {name for name in one if one[name] != two[name]} == {"first batch/x", "first batch/y"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "batch"), [(TWO, "per_worker"), (CLUSTER, "global")], ids=str)
def test_an_error_in_one_ranks_pipeline(ranks: Group, layout: Layout, batch: str) -> None:
    *others, failed = ranks(layout.size).outcomes(consume, failing, layout, batch=batch)
    assert isinstance(failed.error, OSError)
    assert "fails_on_the_last_rank" in failed.traceback
    for outcome in others:
        assert isinstance(outcome.error, PeerLost), outcome
        assert f"rank {layout.size - 1}" in str(outcome.error)


def resume(make: Any, layout: Layout, skip: int) -> None:
    with opened(make, layout, batch="global") as made:
        made.fingerprint()
        list(made.epoch(0, skip=skip))


@pytest.mark.exhaustive
def test_an_error_in_batches_that_a_resume_skips(ranks: Group) -> None:
    other, failed = ranks(2).outcomes(resume, failing, TWO, 5)
    assert isinstance(failed.error, OSError)
    assert isinstance(other.error, PeerLost), other


def test_the_first_epoch_is_compared_where_the_look_was_none(ranks: Group) -> None:
    for outcome in ranks(2).outcomes(resume, loader_of_rank, TWO, 0):
        assert "batch 0 of epoch 0 differs in x: rank 1" in str(outcome.error)


OWN = {"batch": "per_worker"}
REFUSED = [
    (shuffled_without_seed, TWO, {}, "batch 0 of epoch 0 differs in x: rank 1"),
    (shorter_by_rank, TWO, {}, "differs in number of rows"),
    (one_batch_less, TWO, {}, "rank 1 ran out of data after 5 batches, rank 0 did not"),
    (of_rank, CLUSTER, OWN, "the next batch of replica 0 differs in x: ranks 1, 3 got"),
    (of_rank, CLUSTER, OWN, "distributed.current_world().replica"),
    (more_by_rank, SPREAD, OWN, "replica 0 differs in having a batch: ranks 2, 3"),
    (of_rank, ONE, OWN, "All ranks hold one copy of the model together"),
    (empty, TWO, OWN, "no rank has a single batch"),
    (ordered, TWO, {"shard": "file"}, "cannot be sharded by file"),
]


@pytest.mark.parametrize(("make", "layout", "config", "says"), REFUSED)
def test_all_ranks_refuse(ranks: Group, make: Any, layout: Layout, config: Any, says: str) -> None:
    kind = DataError if make in (empty, ordered) else DivergenceError
    for outcome in ranks(layout.size).outcomes(consume, make, layout, **config):
        assert isinstance(outcome.error, kind), outcome
        assert says in str(outcome.error)
        assert layout is not ONE or "per_worker" not in str(outcome.error)


def test_files_of_a_rank(ranks: Group, tmp_path: Path) -> None:
    names = [f"{file}.txt" for file in range(5)]
    for name in names:
        (tmp_path / name).write_text("\n".join(str(int(name[0]) * 10 + row) for row in range(10)))
    assert [rank_files(names, rank, 3) for rank in range(3)] == [names[r::3] for r in range(3)]
    for layout, config in ((Layout(1, 3), {}), (TWO, OWN), (TWO, {"shard": "batch"})):
        results = ranks(layout.size).run(
            watch, files, layout, str(tmp_path), **({"shard": "file"} | config)
        )
        check(results, layout, list(range(50)))
        if config == OWN:
            mine = [flat(result["rows"][0]) for result in results]
            assert [{row // 10 for row in own} for own in mine] == [{0, 2, 4}, {1, 3}]
    with pytest.raises(DataError, match=r"5 files .* 8 ranks.*3 more are needed"):
        rank_files(names, 0, 8)
    with pytest.raises(DataError, match="the list of files is empty"):
        rank_files([], 0, 1)


def test_examples_that_differ_say_where_random_numbers_belong() -> None:
    names = [["data training/examples/x"], ["data training/length"]]
    says = [_explain(name, [{name[0]: "1"}, {name[0]: "2"}], [0, 1]) for name in names]
    assert ["random=True" in text for text in says] == [True, False]
    assert ["per_worker" in text for text in says] == [False, True]


def test_too_few_files(ranks: Group, tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("1\n2\n")
    outcomes = ranks(2).outcomes(watch, lines, TWO, str(tmp_path), shard="file")
    assert all(outcome.error is not None for outcome in outcomes)
    assert any("number of files" in str(outcome.error) for outcome in outcomes)
