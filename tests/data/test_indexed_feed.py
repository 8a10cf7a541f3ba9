"""Arrays: every row once, in the order of the seed, as Keras would batch and cast them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from ktrainer.data import ShuffleOrder, array_rows, bounds, indexed_feed
from ktrainer.errors import DataError
from tests.data.feeds import feed, flat, numbered, rows


@given(n=st.integers(0, 300), size=st.integers(1, 9))
def test_slices_are_the_batch(n: int, size: int) -> None:
    parts = [bounds(n, rank, size) for rank in range(size)]
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(n))
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=60)
@given(
    n=st.integers(1, 90),
    batch=st.integers(1, 40),
    size=st.integers(1, 6),
    shuffle=st.booleans(),
    per_worker=st.booleans(),
    epoch=st.integers(0, 3),
    skip=st.integers(0, 3),
)
def test_every_row_once_over_the_ranks(
    n: int, batch: int, size: int, shuffle: bool, per_worker: bool, epoch: int, skip: int
) -> None:
    options: dict[str, Any] = {"batch_size": batch, "shuffle": shuffle}
    options["batch"] = "per_worker" if per_worker else "global"
    alone = feed(numbered(n), batch_size=batch * size if per_worker else batch, shuffle=shuffle)
    wanted = rows(alone.epoch(epoch))
    assert sorted(flat(wanted)) == list(range(n))
    feeds = [feed(numbered(n), rank, size, **options) for rank in range(size)]
    assert {f.num_batches for f in feeds} == {len(wanted)}
    local_batches = [list(f.epoch(epoch, skip)) for f in feeds]
    steps = list(zip(*[rows(s) for s in local_batches], strict=True))
    assert [flat(step) for step in steps] == wanted[skip:]
    for step in zip(*local_batches, strict=True):
        assert {s.global_examples for s in step} == {sum(s.examples for s in step)}
        assert all(s.is_padding == (s.examples == 0) for s in step)


def test_241_samples_in_batches_of_32() -> None:
    local_batches = [list(feed(numbered(241), rank, 4).epoch(0)) for rank in range(4)]
    assert [s.examples for s in local_batches[0]] == [8] * 7 + [5]
    assert [s.examples for s in local_batches[3]] == [8] * 7 + [4]
    assert [s.global_examples for s in local_batches[2]] == [32] * 7 + [17]


def test_padding_is_a_row_of_the_same_batch() -> None:
    local_batches = list(feed(numbered(5), 3, 4, batch_size=2, shuffle=False).epoch(0))
    assert [s.examples for s in local_batches] == [0, 0, 0]
    assert [s.batch[1].tolist() for s in local_batches] == [[0], [2], [4]]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    one, two = feed(numbered(50), seed=3), feed(numbered(50), 1, 2, seed=3)
    assert isinstance(one, indexed_feed.IndexedFeed)
    assert isinstance(two, indexed_feed.IndexedFeed)
    list(one.epoch(0))
    np.testing.assert_array_equal(one.order(4), two.order(4))
    assert not np.array_equal(one.order(4), one.order(5))
    assert not np.array_equal(one.order(4), feed(numbered(50), seed=4).order(4))  # type: ignore
    assert feed(numbered(50), training=False).order(0) is None  # type: ignore[attr-defined]
    assert rows(feed(numbered(5), seed=-1).epoch(0)) != rows(feed(numbered(5)).epoch(0))


def test_the_order_of_keras_is_drawn_once() -> None:
    """It is the same in every epoch, and drawing it takes longer than some epochs' steps."""
    seeds = [ShuffleOrder(seed, keras=True) for seed in (3, 4)]
    made = feed(numbered(50), order=seeds[0])
    assert isinstance(made, indexed_feed.IndexedFeed)
    first = made.order(0)
    assert made.order(5) is first
    np.testing.assert_array_equal(first, seeds[0].rows(5, 50, made.global_batch, False))
    made.set_shuffle_order(seeds[1])
    np.testing.assert_array_equal(made.order(0), seeds[1].rows(0, 50, made.global_batch, False))
    assert not np.array_equal(made.order(0), first)


def test_limit_and_remainder() -> None:
    assert rows(feed(numbered(10), batch_size=4, shuffle=False, limit=2).epoch(1)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert feed(numbered(10), batch_size=4, drop_remainder=True).num_batches == 2
    assert feed(numbered(10), batch_size=4, drop_remainder=True, training=False).num_batches == 3
    assert feed(numbered(100), batch_size=10, limit=0.25).num_batches == 2
    assert feed(numbered(100), batch_size=10, limit=1.0).num_batches == 10
    assert feed(numbered(100), batch_size=10, limit=1).num_batches == 1
    assert feed(numbered(100), batch_size=10, limit=0.001).num_batches == 1
    assert list(feed(numbered(100), limit=0).epoch(0)) == []


def _x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(70, 3))


_Y = np.arange(70) % 3
_ZOO: dict[str, tuple[Any, ...]] = {
    "x alone": (_x(),),
    "float64": (_x(), _Y),
    "float16 and weights": (_x().astype(np.float16), _Y, np.ones(70)),
    "bool": (_x() > 0, _Y),
    "dict and list": ({"b": _x(), "a": [_Y, _x()]}, {"p": _Y, "q": _Y[:, None]}),
    "one weight array for two outputs": (_x(), [_Y, _Y], np.ones(70)),
    "tensors": (tf.constant(_x()), tf.constant(_Y)),
    "strings": (np.array([f"word {i}" for i in range(70)], object), _Y),
    "ragged": (tf.RaggedTensor.from_row_lengths(tf.range(140), [2] * 70), _Y),
    "sparse": (tf.sparse.from_dense(_x()), _Y),
    "no targets, weights": (_x(), None),
}


@pytest.mark.parametrize("name", _ZOO)
def test_same_batches_as_keras(name: str) -> None:
    data = _ZOO[name]
    ours = list(feed(data, batch_size=32, shuffle=False).epoch(0))
    theirs = list(ArrayDataAdapter(*data, batch_size=32).get_tf_dataset())
    assert len(ours) == len(theirs) == 3
    for mine, keras_batch in zip(ours, theirs, strict=True):
        tf.nest.assert_same_structure(mine.batch, keras_batch, expand_composites=True)
        parts = zip(_flat(mine.batch), _flat(keras_batch), strict=True)
        for a, b in parts:
            assert tf.as_dtype(a.dtype) == b.dtype
            np.testing.assert_array_equal(a, b)
    spec = feed(data, batch_size=32).spec
    for local_batch in ours:
        leaves = zip(tf.nest.flatten(spec), tf.nest.flatten(local_batch.batch), strict=True)
        assert all(leaf.is_compatible_with(tf.type_spec_from_value(v)) for leaf, v in leaves)


def _flat(batch: Any) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)


def test_exotic_leaves_are_shuffled_and_sliced() -> None:
    data = (tf.sparse.from_dense(np.eye(6)), tf.constant([f"{i}" for i in range(6)]), np.arange(6))
    local_batches = [list(feed((data, data[2]), r, 2, batch_size=4).epoch(0)) for r in range(2)]
    seen = []
    for local_batch in local_batches[0] + local_batches[1]:
        (sparse, words, numbers), _ = local_batch.batch
        np.testing.assert_array_equal(tf.argmax(tf.sparse.to_dense(sparse), 1), numbers)
        assert [int(word) for word in words.numpy()] == numbers.tolist()
        seen += numbers.tolist()
    assert sorted(seen) == list(range(6))


@pytest.mark.parametrize(
    "y",
    [
        np.array([0, 2, 1, 7]),
        np.array([[0.0], [1.9], [1.0], [7.0]]),
        np.eye(4)[[3, 1, 0, 2]],
    ],
)
def test_class_weights_are_those_of_keras(y: np.ndarray) -> None:
    weights = {0: 0.5, 2: 3.0}
    local_batch = next(
        iter(feed((np.ones((4, 2)), y), shuffle=False, class_weight=weights).epoch(0))
    )
    theirs = next(iter(ArrayDataAdapter(np.ones((4, 2)), y, class_weight=weights).get_tf_dataset()))
    np.testing.assert_array_equal(local_batch.batch[2], theirs[2])
    assert local_batch.batch[2].dtype == np.float32


def test_numpy_strings() -> None:
    local_batch = next(iter(feed((np.array(["a", "bc"]), np.arange(2)), shuffle=False).epoch(0)))
    assert local_batch.batch[0].numpy().tolist() == [b"a", b"bc"]


@pytest.mark.parametrize("layout", ["every other row", "columns"])
def test_rows_of_a_view_are_taken_without_a_copy_of_all(layout: str) -> None:
    if layout == "columns":
        view = np.asfortranarray(np.arange(40_000.0, dtype=np.float32).reshape(1000, 40))
    else:
        view = np.arange(80_000.0, dtype=np.float32).reshape(2000, 40)[::2]
    source = array_rows.ArrayRows(view)
    tracemalloc.start()
    try:
        taken = source.take(np.array([7, 3]), ShuffleOrder(0, 2), 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(taken, view[[7, 3]])
    assert peak < view.nbytes / 4


def test_uniform() -> None:
    assert feed(numbered(4)).uniform
    assert not feed(_ZOO["ragged"]).uniform


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((np.ones(3), np.ones(4)), {}, "x: 3, y: 4"),
        ((np.ones(0), np.ones(0)), {}, "no rows"),
        ((np.ones(3), np.float32(1.0)), {}, "y is a single number"),
        ((np.ones(3), object()), {}, "expected arrays"),
        ((np.ones(3),) * 4, {}, "sequence of 4"),
        ((np.ones(3), np.ones(3), np.ones(3)), {"class_weight": {0: 1.0}}, "exclude each other"),
        ((np.ones(3), [np.ones(3)] * 2), {"class_weight": {0: 1.0}}, "single output"),
        ((np.ones(3), [np.ones(3)] * 2, [np.ones(3)]), {}, "one per output"),
        ((np.ones(3), [np.ones(3)] * 2, np.ones((3, 5))), {}, "one array per output"),
    ],
)
def test_errors_say_what_is_wrong(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        feed(data, **options)


def test_large_batches_are_gathered_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_rows, "_PREFETCH_BYTES", 0)
    ahead, plain = feed(numbered(100), batch_size=7), feed(numbered(100), batch_size=7, prefetch=0)
    for epoch in range(2):
        assert rows(ahead.epoch(epoch, 2)) == rows(plain.epoch(epoch, 2))
    local_batches = ahead.epoch(2)
    next(local_batches)
    ahead.close()
    ahead.close()  # the leak check finds a thread that stays


def test_fingerprint_names_what_differs() -> None:
    x, y = numbered(241)
    facts = feed((x, y)).fingerprint()
    assert set(facts) == {"x", "y", "length", "order"}
    swapped = np.concatenate([x[:100][::-1], x[100:]])
    assert {k for k, v in feed((swapped, y)).fingerprint().items() if v != facts[k]} == {"x"}
    other = feed((x, y), seed=1).fingerprint()
    assert {k for k, v in other.items() if v != facts[k]} == {"order"}
    assert feed((x, y), 1, 2).fingerprint() == facts


def test_floats_follow_floatx() -> None:
    keras.config.set_floatx("float64")
    local_batch = next(iter(feed(numbered(4)).epoch(0)))
    assert local_batch.batch[0].dtype == np.float64
