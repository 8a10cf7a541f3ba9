"""tf.data pipelines: slices, orders, endless ones, and what `Model.fit` would have seen."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.data import Feed, require_end
from ktrainer.data.dataset_iterator import elements, free
from ktrainer.data.dataset_source import DatasetSource
from ktrainer.errors import DataError
from tests.data.feeds import Recorder, feed, flat, numbered, rows


def batches(count: int, batch: int = 32) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(count)).batch(batch)


@pytest.mark.parametrize(
    ("count", "batch", "size"), [(241, 32, 3), (9, 4, 5), (6, 6, 2), (1, 8, 3)]
)
def test_the_slices_of_all_ranks_are_the_batches(count: int, batch: int, size: int) -> None:
    local_batches = [list(feed(batches(count, batch), r, size).epoch(0)) for r in range(size)]
    joined = [flat(step) for step in zip(*[rows(s) for s in local_batches], strict=True)]
    assert joined == [y.numpy().tolist() for _, y in batches(count, batch)]
    for step in zip(*local_batches, strict=True):
        assert {s.global_examples for s in step} == {sum(s.examples for s in step)}


def test_structures_and_composites_are_sliced() -> None:
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(12), [2] * 6)
    sparse = tf.sparse.from_dense(np.eye(6))
    data = {"r": ragged, "s": sparse, "deep": (np.arange(6), np.arange(6.0))}
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(4)
    for rank, numbers in enumerate(([[0, 1], [4]], [[2, 3], [5]])):
        local_batches = list(feed(dataset, rank, 2).epoch(0))
        assert [s.batch["deep"][0].numpy().tolist() for s in local_batches] == numbers
        for local_batch, want in zip(local_batches, numbers, strict=True):
            np.testing.assert_array_equal(
                local_batch.batch["r"].to_tensor(), ragged.to_tensor().numpy()[want]
            )
            np.testing.assert_array_equal(
                tf.sparse.to_dense(local_batch.batch["s"]), np.eye(6)[want]
            )
            assert local_batch.batch["deep"][1].dtype == tf.float64


def test_epochs_after_the_first_open_the_same_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    original, traced = DatasetSource._slice, []

    def counted(source: DatasetSource, *parts: Any) -> Any:
        traced.append(parts)
        return original(source, *parts)

    monkeypatch.setattr(DatasetSource, "_slice", counted)
    made = feed(batches(70).shuffle(3, seed=1), 0, 2)
    orders = [flat(rows(made.epoch(epoch))) for epoch in range(3)]
    assert len(traced) == 1  # opening it is then independent of how much data it holds in memory
    assert len({tuple(order) for order in orders}) > 1  # its shuffle still draws a new order
    assert flat(rows(made.epoch(3, skip=1)))  # a pipeline of its own
    assert len(traced) == 2


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_a_freed_pipeline_yields_nothing_more(kind: str) -> None:
    dataset = batches(40, batch=4).prefetch(2)
    if kind == "ragged":
        dataset = dataset.map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))
    opened, other = elements(dataset), elements(dataset)
    next(opened.values)
    free(opened.resource, dataset.take(0))
    assert list(opened.values) == []
    assert len(list(other.values)) == 10


def test_spec_leaves_the_batch_open() -> None:
    made = feed(tf.data.Dataset.from_tensor_slices(numbered(8)).batch(4, drop_remainder=True))
    assert [spec.shape.as_list() for spec in made.spec] == [[None, 3], [None]]
    assert made.uniform
    assert made.num_batches == 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_a_reshuffled_pipeline_gives_the_orders_of_fit(known: bool) -> None:
    def make() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(numbered(12)).shuffle(12, seed=5)
        return (dataset if known else dataset.filter(lambda x, y: True)).batch(5)

    model = Recorder()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(make(), epochs=3, verbose=0)
    ours = feed(make())
    assert flat(rows(ours.epoch(epoch)) for epoch in range(3)) == model.seen
    for size in (1, 2):
        resumed = feed(make(), 0, size)
        resumed.fingerprint()
        mine = [batch[: -(-len(batch) // size)] for batch in model.seen[7:]]
        assert rows(resumed.epoch(2, skip=1)) == mine


def _shuffled(count: int = 12, seed: int = 1, **more: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(count)).shuffle(count, seed=seed, **more)


def lines(folder: Path) -> tf.data.Dataset:
    """Rows 0 to 39, from four files."""
    for number in range(4):
        text = "\n".join(str(row) for row in range(number * 10, number * 10 + 10))
        (folder / f"part-{number}.txt").write_text(text)
    paths = sorted(str(path) for path in folder.glob("part-*.txt"))
    numbers = tf.data.TextLineDataset(paths).map(lambda row: tf.strings.to_number(row, tf.int32))
    return numbers.map(lambda row: (tf.cast([row], tf.float32), row))


PIPELINES = {
    "two shuffles": lambda: _shuffled().shuffle(4, seed=2).batch(5),
    "interleaved": lambda: (
        tf.data.Dataset.range(4)
        .shuffle(4, seed=1)
        .interleave(lambda k: tf.data.Dataset.from_tensor_slices(numbered(12)).shard(4, k))
        .shuffle(3, seed=2)
        .batch(5)
    ),
    "repeated batches": lambda: _shuffled().batch(5).repeat(2),
    "repeated below": lambda: _shuffled(6).repeat(2).shuffle(5, seed=3).batch(5),
    "joined": lambda: _shuffled(6).concatenate(_shuffled(6, 7)).shuffle(3, seed=2).batch(5),
    "joined last": lambda: _shuffled(6).concatenate(_shuffled(6, 7)).batch(5),
    "joined and long": lambda: _shuffled(60).concatenate(_shuffled(60, 7)).batch(5),
    "repeated for ever": lambda: _shuffled(60).shuffle(3, seed=2).repeat().batch(5),
    "cached in part": lambda: _shuffled(60).batch(5).cache(),
    "cached": lambda: _shuffled().batch(5).cache(),
    "cached and shuffled": lambda: (
        _shuffled().shuffle(3, seed=4).cache().shuffle(9, seed=2).batch(5)
    ),
}


@pytest.mark.parametrize(
    ("kind", "limit", "size"),
    [(kind, 2 if "ever" in kind or "part" in kind else None, 1) for kind in PIPELINES]
    + [("two shuffles", 2, 1), ("repeated for ever", 2, 2), ("joined and long", None, 2)],
)
def test_a_resumed_pipeline_continues_with_the_order_of_its_epoch(
    kind: str, limit: int | None, size: int
) -> None:
    """Shuffles below others draw seeds as they are read; a cache keeps what was drawn. Validation
    reads one pass after the other."""

    def made(passes: int | None, looks: bool = False) -> Feed:
        opened = feed(PIPELINES[kind](), 0, size, limit=limit, training=passes is None)
        if looks:
            opened.fingerprint()
            opened.peek(1)
        opened.replay_passes(passes or 0)
        return opened

    whole, validation = made(None), made(0)
    orders = [rows(whole.epoch(epoch)) for epoch in range(4)]
    validated = [rows(validation.epoch(0)) for _ in range(4)]
    for looks in (False, True):
        for epoch in (1, 3):
            resumed = made(None, looks)
            assert rows(resumed.epoch(epoch, skip=1)) == orders[epoch][1:], looks
            assert epoch == 3 or rows(resumed.epoch(2)) == orders[2], looks
        resumed = made(2, looks)
        assert [rows(resumed.epoch(0)) for _ in range(2)] == validated[2:], looks


@pytest.mark.parametrize(
    ("dataset", "limit"),
    [
        (lambda: _shuffled().repeat().batch(5).take(4), None),
        (lambda: _shuffled().repeat(3).take(20).batch(5), None),
        (lambda: _shuffled(6).concatenate(_shuffled(6)).shuffle(2).take(8).batch(5), None),
        (lambda: _shuffled().concatenate(_shuffled()).batch(5), 2),
    ],
)
def test_a_resume_says_where_an_order_cannot_be_that_of_before(dataset: Any, limit: Any) -> None:
    with pytest.warns(UserWarning, match="below a repeat or concatenate that is read in part"):
        next(feed(dataset(), limit=limit).epoch(1))
    next(feed(dataset(), limit=limit).epoch(0))


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: _shuffled().repeat(3).take(40).batch(5),
        lambda: _shuffled().repeat(2).take(24).batch(5),
        lambda: _shuffled().take(8).batch(5),
        lambda: _shuffled().cache().repeat(3).take(20).batch(5),
        lambda: _shuffled(reshuffle_each_iteration=False).repeat(3).take(20).batch(5),
        lambda: _shuffled().repeat(2).enumerate().map(lambda _, row: row).batch(5),
        lambda: _shuffled(6).concatenate(_shuffled(6)).enumerate().map(lambda _, row: row).batch(5),
        lambda: (
            tf.data.Dataset.zip(_shuffled().repeat(2), tf.data.Dataset.range(24))
            .map(lambda row, _: row)
            .batch(5)
        ),
    ],
)
def test_operations_that_leave_the_order_known(dataset: Any) -> None:
    orders = [rows(whole.epoch(epoch)) for whole in [feed(dataset())] for epoch in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows(feed(dataset()).epoch(2)) == orders[2]


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_that_all_others_repeat(endless: bool, size: int) -> None:
    def opened() -> Feed:
        data = _shuffled().batch(4)
        made = feed(data.repeat() if endless else data, 0, size, limit=2)
        made.repeat_first_epoch()
        return made

    made, resumed = opened(), opened()
    first = rows(made.epoch(0))
    assert [rows(made.epoch(epoch)) for epoch in (1, 2)] == [first, first]
    if (state := made.state(inside_epoch=True)) is not None:
        resumed.resume_from(state)
    assert [rows(resumed.epoch(2, skip=1)), rows(resumed.epoch(3))] == [first[1:], first]


def test_a_resume_says_where_the_first_batches_may_be_others() -> None:
    def resumed(data: Any) -> Feed:
        made = feed(data, limit=2)
        made.repeat_first_epoch()
        return made

    unseeded = tf.data.Dataset.from_tensor_slices(numbered(12)).shuffle(12).batch(4)
    for data in (unseeded, lambda: iter([numbered(4)] * 3)):
        for epoch, skip in ((0, 1), (1, 0)):
            with pytest.warns(UserWarning, match="the first batches were read again for this"):
                next(resumed(data).epoch(epoch, skip))
        next(resumed(data).epoch(0))
    next(resumed(_shuffled().batch(4)).epoch(1))


def test_first_batches_that_are_kept_hold_no_larger_array() -> None:
    made = feed(
        lambda: (tuple(leaf[k : k + 4] for leaf in numbered(99)) for k in range(9)), limit=2
    )
    made.repeat_first_epoch()
    for batch in made.epoch(0):
        assert all(leaf.base is None for leaf in batch.batch)
    made.close()
    assert made._first is None


def test_limit_restarts_each_epoch() -> None:
    made = feed(batches(20, 4), limit=2)
    assert made.num_batches == 2
    assert rows(made.epoch(0)) == rows(made.epoch(1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows(made.epoch(1, skip=1)) == [[4, 5, 6, 7]]
    assert list(made.epoch(1, skip=2)) == []
    assert feed(batches(20, 4), limit=0.6).num_batches == 3


def test_an_endless_pipeline_continues() -> None:
    endless = batches(12, 4).repeat()
    made = feed(endless, limit=2)
    assert [rows(made.epoch(epoch)) for epoch in range(2)] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [0, 1, 2, 3]],
    ]
    assert rows(feed(endless, limit=2).epoch(1, skip=1)) == [[0, 1, 2, 3]]
    evaluated = feed(endless, limit=2, training=False)
    assert rows(evaluated.epoch(0)) == rows(evaluated.epoch(1))
    assert feed(endless).num_batches is None
    with pytest.raises(DataError, match="whole number of batches"):
        feed(endless, limit=0.5)


@pytest.mark.parametrize("kind", ["element", "file"])
def test_a_shard_of_an_endless_pipeline_continues(kind: str, tmp_path: Path) -> None:
    made = feed(lines(tmp_path).batch(4).repeat(), 0, 2, shard=kind, limit=4)
    epochs = [flat(rows(made.epoch(epoch))) for epoch in range(3)]
    assert [len(set(epoch)) for epoch in epochs] == [8, 8, 8]
    assert not set(epochs[0]) & set(epochs[1])
    with pytest.raises(DataError, match="never ends"):
        require_end(feed(lines(tmp_path).batch(4).repeat(), 0, 2, shard=kind), "steps_per_epoch")


def test_a_resumed_shard_of_files_has_the_order_of_its_epoch(tmp_path: Path) -> None:
    def shard() -> Feed:
        return feed(lines(tmp_path).shuffle(20, seed=1).batch(4), 0, 2, shard="file")

    whole = shard()
    orders = [rows(whole.epoch(epoch)) for epoch in range(3)]
    assert orders[0] != orders[1]
    for epoch in (1, 2):
        assert rows(shard().epoch(epoch, skip=1)) == orders[epoch][1:]


def test_unknown_lengths() -> None:
    made = feed(batches(12, 4).filter(lambda x, y: y[0] > 0))
    assert made.num_batches is None
    assert rows(made.epoch(0)) == rows(made.epoch(1)) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert made.fingerprint()["length"] == "unknown"


def test_class_weights() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((3, 1)), [0, 1, 2])).batch(3)
    local_batch = next(feed(dataset, class_weight={0: 0.5, 2: 3.0}).epoch(0))
    assert local_batch.batch[2].numpy().tolist() == [0.5, 1.0, 3.0]


def test_empty_batches_are_skipped() -> None:
    data = batches(20, 4).map(lambda x, y: (x[y % 8 > 3], y[y % 8 > 3]))
    whole = [[4, 5, 6, 7], [12, 13, 14, 15]]
    for size in (1, 2):
        assert rows(feed(data, 0, size).epoch(0)) == [row[: 4 // size] for row in whole]
        # A resume counts those that have rows.
        assert rows(feed(data, 0, size).epoch(0, skip=1)) == [whole[1][: 4 // size]]
    ragged = data.map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))
    assert rows(feed(ragged, 0, 1).epoch(0, skip=1)) == whole[1:]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (tf.data.Dataset.range(4), "not batches"),
        (tf.data.Dataset.from_tensors((tf.ones([2]),) * 4), "tuples of 4"),
    ],
)
def test_errors_say_what_is_wrong(dataset: tf.data.Dataset, message: str) -> None:
    with pytest.raises(DataError, match=message):
        feed(dataset)


def graphs(nodes: int) -> tf.data.Dataset:
    """Batches of six edges."""
    x = {"edges": np.arange(12).reshape(1, 6, 2), "nodes": np.zeros((1, nodes, 3), np.float32)}
    return tf.data.Dataset.from_tensor_slices((x, np.arange(6).reshape(1, 6))).repeat(2)


def test_a_shard_does_not_cut_what_has_no_common_rows() -> None:
    for shard in ("element", "batch"):
        with pytest.raises((DataError, tf.errors.InvalidArgumentError), match="not examples"):
            rows(feed(graphs(nodes=4), 0, 2, shard=shard).epoch(0))
    assert rows(feed(graphs(nodes=6), 0, 2, shard="element").epoch(0)) == [[0, 1, 2], [3, 4, 5]]
    whole = feed(graphs(nodes=4), 0, 2, shard="element", batch="per_worker").epoch(0)
    assert [each.batch[1].shape for each in whole] == [(6,)]


@pytest.mark.parametrize("kind", ["tf.data", "generator"])
def test_a_batch_whose_first_part_is_empty_is_not_dropped(kind: str) -> None:
    """A graph of four nodes without edges, after one with six."""
    both = (
        graphs(nodes=4)
        .take(1)
        .concatenate(graphs(nodes=4).take(1).map(lambda x, y: (x | {"edges": x["edges"][:0]}, y)))
    )
    given: Any = both if kind == "tf.data" else lambda: both.as_numpy_iterator()
    local_batches = list(feed(given, batch="per_worker").epoch(0))
    assert [each.batch[0]["edges"].shape[0] for each in local_batches] == [6, 0]
    assert [each.examples for each in local_batches] == [6, 6]
    if kind == "tf.data":
        assert [each.examples for each in feed(both, batch="per_worker").epoch(0, skip=1)] == [6]
    no_edges = both.skip(1).map(lambda x, y: (x,))
    given = no_edges if kind == "tf.data" else lambda: no_edges.as_numpy_iterator()
    with pytest.raises(DataError, match="edges: 0, x/nodes: 4"):
        list(feed(given, 0, 2).epoch(0))


def test_ranks_compare_batches_that_hold_none() -> None:
    data = batches(6, 4).map(lambda x, y: (x, y, None))
    made = feed(data, 1, 2)
    assert set(made.fingerprint()) >= {"first batch/x", "first batch/y"}
    assert [each.batch[2] for each in made.epoch(0)] == [None, None]
    assert rows(made.epoch(1), leaf=1) == [[2, 3], [5]]


def test_a_resume_in_a_shard_that_is_cut() -> None:
    def shard() -> Any:
        return feed(batches(40, 4).shuffle(10, seed=1), 1, 2, shard="element")

    first, again = shard(), shard()
    local_batches = first.epoch(0)
    begun = [next(local_batches) for _ in range(3)]
    again.resume_from(first.state(inside_epoch=True))
    rest = rows(again.epoch(0, skip=3))
    assert rest == rows(local_batches)
    assert len(set(flat([*rows(begun), *rest]))) == 20


def same(*row: Any) -> Any:
    return row


def any_options(data: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return data.map(same, 4).with_options(options)


def interleaved(data: tf.data.Dataset) -> tf.data.Dataset:
    one = tf.data.Dataset.from_tensors
    return data.interleave(lambda *row: one(row), num_parallel_calls=2, deterministic=False)


def nested(data: tf.data.Dataset) -> tf.data.Dataset:
    one = tf.data.Dataset.from_tensors
    return data.flat_map(lambda *row: one(row).map(same, 2, deterministic=False))


IN_ANY_ORDER = {
    "map": lambda data: data.map(same, 4, deterministic=False),
    "options": any_options,
    "interleave": interleaved,
    "nested": nested,
}


@pytest.mark.parametrize("kind", IN_ANY_ORDER)
def test_a_pipeline_in_any_order_is_not_shared(kind: str) -> None:
    def make() -> tf.data.Dataset:
        return IN_ANY_ORDER[kind](tf.data.Dataset.from_tensor_slices(numbered(16))).batch(4)

    for options in ({}, {"shard": "element"}):
        with pytest.raises(DataError, match="deterministic=False"):
            feed(make(), 1, 2, **options)
    for options in ({"size": 1}, {"size": 2, "batch": "per_worker"}):
        assert sorted(flat(rows(feed(make(), **options).epoch(0)))) == list(range(16))


def test_a_pipeline_in_order_is_shared() -> None:
    one = tf.data.Dataset.from_tensors
    data = tf.data.Dataset.from_tensor_slices(numbered(16))
    data = data.interleave(lambda *row: one(row), num_parallel_calls=2)
    data = data.map(same, 4, deterministic=True).shuffle(4, seed=1).batch(4)
    assert rows(feed(data, 1, 2).epoch(0))


@pytest.mark.parametrize("size", [1, 2])
def test_the_users_own_error_comes_through(size: int) -> None:
    def fail(x: Any) -> Any:
        if x.numpy() == 9:
            raise KeyError("no such picture")
        return x

    data = tf.data.Dataset.range(16).map(
        lambda x: tf.ensure_shape(tf.py_function(fail, [x], x.dtype), [])
    )
    with pytest.raises(tf.errors.OpError) as caught:
        list(feed(data.batch(4), 0, size).epoch(0))
    assert "no such picture" in "".join(traceback.format_exception(caught.value))


def test_elements_are_those_of_the_dataset() -> None:
    nested = batches(10, 4).map(lambda x, y: ({"b": x, "a": (y, y)}, y))
    spec = tf.TensorSpec(None, tf.float32)
    unknown = tf.data.Dataset.from_generator(lambda: iter([1.0, [2.0, 3.0]]), output_signature=spec)
    for dataset in (batches(10, 4), nested, batches(10, 4).map(lambda x, y: x), unknown):
        for ours, theirs in zip(elements(dataset).values, dataset, strict=True):
            tf.nest.assert_same_structure(ours, theirs)
            for a, b in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
                np.testing.assert_array_equal(a, b)


def test_what_reads_a_shuffled_dataset_after_a_fit_sees_the_order_of_keras() -> None:
    def orders(fit: Any, evaluate: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        x = np.arange(12, dtype="float32").reshape(12, 1)
        data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(12).batch(4)
        held_out = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(12).batch(4)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model, data, epochs=2, validation_data=held_out, shuffle=False, verbose=0)
        fit(model, data, validation_data=held_out, validation_steps=1, shuffle=False, verbose=0)
        evaluate(model, held_out, verbose=0)
        return [list(each.as_numpy_iterator()) for each in (data, held_out)]

    trainer = Trainer({"seed": 1})
    theirs = orders(keras.Model.fit, keras.Model.evaluate)
    keras.tree.map_structure(
        np.testing.assert_array_equal, orders(trainer.fit, trainer.evaluate), theirs
    )
