"""Real ranks: all rows once, the same steps everywhere, and no wait for a rank without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ktrainer import world
from ktrainer.config import Config, DataConfig
from ktrainer.errors import DataError, DivergenceError, PeerLost
from ktrainer.feed import ShuffleOrder, make_feed, order_of
from tests.dist.harness import Ranks
from tests.feed.test_python_data import Numbers
from tests.feed.worlds import flat, numbered, rows

Group = Callable[..., Ranks]
HINT = tf.data.experimental.SHARD_HINT


def ordered() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(241)).batch(32)


def unknown_length() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(241)).filter(lambda x, y: True).batch(32)


def seeded() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(241)).shuffle(241, seed=1).batch(32)


def shuffled_without_seed() -> tf.data.Dataset:
    tf.random.set_seed(world.current().rank)  # as if the ranks had never been given one
    return tf.data.Dataset.from_tensor_slices(numbered(241)).shuffle(241).batch(32)


def own(counts: list[int]) -> tf.data.Dataset:
    here = world.current()
    mine = tf.data.Dataset.from_tensor_slices(numbered(241)).shard(here.size, here.rank)
    return mine.take(counts[here.rank]).batch(8)


def generator(count: int = 241) -> Iterator[Any]:
    x, y = numbered(241)
    for start in range(0, count, 32):
        stop = min(start + 32, count)
        yield x[start:stop], y[start:stop]


def shorter_by_rank() -> Iterator[Any]:
    yield from generator(241 - 64 * world.current().rank)


def sentences() -> Iterator[Any]:
    for length in (2, 3, 4 + world.current().rank):
        yield np.ones((4, length), np.float32), np.zeros(4)


def fails_on_the_last_rank() -> Iterator[Any]:
    yield from generator(96)
    if world.current().rank == world.current().size - 1:
        raise OSError("disk gone")
    yield from generator(96)


def hinted() -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(numbered(241)).shard(HINT, HINT).batch(32)
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.HINT
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def lines(folder: str) -> tf.data.Dataset:
    files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    numbers = tf.data.TextLineDataset(files).map(lambda s: tf.strings.to_number(s, tf.int64))
    return numbers.map(lambda y: (tf.zeros([3]), y)).batch(4)


def watch(make: Any, args: tuple[Any, ...] = (), **config: Any) -> dict[str, Any]:
    """Two epochs of a feed on this rank."""
    limit = config.pop("limit", None)
    data = make(*args) if make in (own, lines) or not callable(make) else make()
    if make in (generator, sentences, shorter_by_rank, fails_on_the_last_rank):
        data = make  # a function: called for every epoch
    made = make_feed(
        data,
        world=world.current(),
        config=DataConfig(**config),
        training=True,
        order=ShuffleOrder(),
        limit=limit,
    )
    try:
        facts = made.fingerprint()
        epochs = [list(made.epoch(epoch)) for epoch in range(2)]
        return {
            "facts": facts,
            "rows": [rows(shares) for shares in epochs],
            "totals": [[s.global_examples for s in shares] for shares in epochs],
            "batches": made.num_batches,
            "spec": [spec.shape.as_list() for spec in tf.nest.flatten(made.spec)],
        }
    finally:
        made.close()


def check(results: list[dict[str, Any]], wanted: list[int]) -> None:
    """All ranks took the same steps, and saw every row once an epoch."""
    first = results[0]
    for result in results:
        for key in ("facts", "totals", "batches", "spec"):
            assert result[key] == first[key]
    for epoch in range(2):
        assert sorted(flat(flat(r["rows"][epoch]) for r in results)) == sorted(wanted)
        assert sum(first["totals"][epoch]) == len(wanted)
        for step, total in enumerate(first["totals"][epoch]):
            assert sum(len(r["rows"][epoch][step]) for r in results) == total


EVERYTHING = list(range(241))


@pytest.mark.parametrize("size", [2, 3])
def test_global_batches(ranks: Group, size: int) -> None:
    for make in (ordered, unknown_length, seeded, generator, Numbers):
        results = ranks(size).run(watch, make, deadline=120)
        check(results, list(range(50)) if make is Numbers else EVERYTHING)
        if make is not Numbers:
            assert results[0]["totals"][0] == [32] * 7 + [17]
            assert results[0]["facts"]["first batch/rows"] == "32"


def _seed_of_the_order() -> list[int]:
    config, here = DataConfig(), world.current()
    data = numbered(20)
    made = make_feed(
        data, world=here, config=config, training=True, order=order_of(here, Config(seed=None))
    )
    return made.order(0).tolist()  # type: ignore[attr-defined]


def test_arrays_without_a_seed_have_one_order(ranks: Group) -> None:
    one, two = ranks(2).run(_seed_of_the_order)
    assert one == two


def test_own_batches_of_each_rank(ranks: Group) -> None:
    for counts in ([80, 56], [50, 0], [0, 1]):
        results = ranks(2).run(watch, own, (counts,), batch="per_worker")
        mine = [list(range(rank, 241, 2))[: counts[rank]] for rank in range(2)]
        check(results, flat(mine))
        assert [sorted(flat(r["rows"][1])) for r in results] == mine
        assert results[0]["batches"] == -(-max(counts) // 8)
    check(ranks(2).run(watch, shorter_by_rank, batch="per_worker"), EVERYTHING + EVERYTHING[:177])


def test_pipelines_dealt_out(ranks: Group, tmp_path: Path) -> None:
    for file in range(5):
        text = "\n".join(str(file * 10 + line) for line in range(10))
        (tmp_path / f"{file}.txt").write_text(text)
    for batch in ("global", "per_worker"):
        for make in (ordered, seeded, unknown_length, hinted):
            check(ranks(2).run(watch, make, batch=batch, shard="element"), EVERYTHING)
        results = ranks(3).run(watch, lines, (str(tmp_path),), batch=batch, shard="file")
        check(results, list(range(50)))
    totals = ranks(2).run(watch, ordered, shard="element")[0]["totals"][0]
    assert totals[:6] == [32] * 6


def test_ranks_widen_their_spec_together(ranks: Group) -> None:
    for batch in ("global", "per_worker"):
        outcomes = ranks(2).outcomes(watch, sentences, batch=batch)
        if batch == "per_worker":
            assert [o.value["spec"] for o in outcomes] == [[[None, None], [None]]] * 2
        else:  # the third batch is another one on each rank
            assert all(isinstance(o.error, DivergenceError) for o in outcomes)


def test_an_unseeded_shuffle_is_found(ranks: Group) -> None:
    one, two = [r["facts"] for r in ranks(2).run(_facts, shuffled_without_seed)]
    assert {name for name in one if one[name] != two[name]} == {"first batch/x", "first batch/y"}
    one, two = [r["facts"] for r in ranks(2).run(_facts, shuffled_without_seed, shard="element")]
    assert {name for name in one if one[name] != two[name]} == {"first batch/x", "first batch/y"}
    for outcome in ranks(2).outcomes(_without_fingerprint, shuffled_without_seed):
        assert isinstance(outcome.error, DivergenceError)
        assert "batch 0 of epoch 0 differs in x: rank 1" in str(outcome.error)


def _facts(make: Any, **config: Any) -> dict[str, Any]:
    here = world.current()
    made = make_feed(
        make(), world=here, config=DataConfig(**config), training=True, order=ShuffleOrder()
    )
    try:
        return {"facts": made.fingerprint()}
    finally:
        made.close()


def _without_fingerprint(make: Any) -> None:
    here = world.current()
    made = make_feed(make(), world=here, config=DataConfig(), training=True, order=ShuffleOrder())
    try:
        list(made.epoch(0))
    finally:
        made.close()


def test_data_that_ends_early_on_one_rank(ranks: Group) -> None:
    for outcome in ranks(2).outcomes(watch, shorter_by_rank):
        assert isinstance(outcome.error, DivergenceError)
        assert "differs in number of rows" in str(outcome.error)
    for outcome in ranks(2).outcomes(_ends_early):
        assert isinstance(outcome.error, DivergenceError)
        assert "rank 1 ran out of data after 5 batches, rank 0 did not" in str(outcome.error)


def _ends_early() -> None:
    count = 6 - world.current().rank
    _without_fingerprint(lambda: lambda: generator(32 * count))


@pytest.mark.parametrize("batch", ["global", "per_worker"])
def test_an_error_in_one_ranks_pipeline(ranks: Group, batch: str) -> None:
    well, failed = ranks(2).outcomes(watch, fails_on_the_last_rank, batch=batch)
    assert isinstance(failed.error, OSError)
    assert "fails_on_the_last_rank" in failed.traceback
    assert isinstance(well.error, PeerLost)
    assert "rank 1" in str(well.error)


def test_no_data_at_all(ranks: Group) -> None:
    for outcome in ranks(2).outcomes(_empty, batch="per_worker"):
        assert isinstance(outcome.error, DataError)
        assert "no rank has a single batch" in str(outcome.error)


def _empty(**config: Any) -> None:
    here = world.current()
    make_feed(
        lambda: iter(()),
        world=here,
        config=DataConfig(**config),
        training=True,
        order=ShuffleOrder(),
    )


def test_too_few_files(ranks: Group, tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("1\n2\n")
    for outcome in ranks(2).outcomes(watch, ordered, shard="file"):
        assert isinstance(outcome.error, DataError)
        assert "cannot be dealt out by file" in str(outcome.error)
    outcomes = ranks(2).outcomes(watch, lines, (str(tmp_path),), shard="file")
    assert all(outcome.error is not None for outcome in outcomes)
    assert any("number of files" in str(outcome.error) for outcome in outcomes)
