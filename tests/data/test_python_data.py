"""PyDatasets and generators: Keras' rules, threads that end, errors that come through."""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.data import ShuffleOrder
from ktrainer.data.batch_source import unlabelled
from ktrainer.data.pydataset_source import PyDatasetSource
from ktrainer.errors import CheckpointError, ConfigError, DataError
from tests.data.feeds import Place, Recorder, feed, flat, numbered, rows

X, Y = numbered(50)


class Numbers(keras.utils.PyDataset):
    """Batches of 8 numbered rows; shuffles its batches at the end of an epoch, and keeps a log."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(7)
        self.random = np.random.default_rng(0)
        self.log: list[str] = []

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        start = self.order[index] * 8
        return X[start : start + 8], Y[start : start + 8]

    def on_epoch_begin(self) -> None:
        self.log.append("begin")

    def on_epoch_end(self) -> None:
        self.log.append("end")
        self.random.shuffle(self.order)


@pytest.mark.parametrize("options", [{}, {"workers": 3, "max_queue_size": 2}])
def test_a_pydataset_gives_what_fit_would_see(options: dict[str, Any]) -> None:
    theirs, ours = Numbers(**options), Numbers(**options)
    model = Recorder()
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(theirs, epochs=3, verbose=0, shuffle=False)
    made = feed(ours, shuffle=False)
    assert made.num_batches == 7
    assert flat(rows(made.epoch(epoch)) for epoch in range(3)) == model.seen
    assert ours.log == theirs.log
    resumed = feed(Numbers(**options), shuffle=False)
    assert rows(resumed.epoch(2, skip=2)) == model.seen[16:]
    resumed.close()


@pytest.mark.parametrize("order", [{"shuffle": False}, {"order": ShuffleOrder(3, keras=True)}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_look_at_the_first_batch_is_no_epoch(epoch: int, order: dict[str, Any]) -> None:
    """Ranks look at it to compare it, and then resume inside an epoch."""
    keras.utils.set_random_seed(3)
    whole, made = feed(Numbers(), 0, 2, **order), feed(ours := Numbers(), 0, 2, **order)
    expected = [rows(whole.epoch(e)) for e in range(epoch + 1)][epoch]
    keras.utils.set_random_seed(3)
    made.fingerprint()
    assert rows(made.epoch(epoch, skip=2)) == expected[2:]
    assert ours.log == ["end", *["begin", "end"] * (epoch + 1)]


def test_a_pydataset_is_shuffled_as_fit_would() -> None:
    model = Recorder()
    model.compile("sgd", "mse", run_eagerly=True)
    keras.utils.set_random_seed(3)
    model.fit(Numbers(), epochs=3, verbose=0)
    assert model.seen[:7] != sorted(model.seen[:7])
    keras.utils.set_random_seed(3)
    made = feed(Numbers(), order=ShuffleOrder(3, keras=True))
    assert flat(rows(made.epoch(epoch)) for epoch in range(3)) == model.seen
    keras.utils.set_random_seed(3)
    resumed = feed(Numbers(), order=ShuffleOrder(3, keras=True))
    assert rows(resumed.epoch(2, skip=3)) == model.seen[17:]


class Augmented(Numbers):
    """Draws from Python's `random` for each batch, as augmentation does."""

    def on_epoch_end(self) -> None:
        pass

    def __getitem__(self, index: int) -> Any:
        random.random()
        return super().__getitem__(index)


@pytest.mark.parametrize("from_what", ["checkpoint", "order"])
def test_an_order_drawn_inside_an_epoch_is_kept_where_random_was_used(from_what: str) -> None:
    keras.utils.set_random_seed(3)
    made = feed(Augmented(), order=ShuffleOrder(3, keras=True))
    first, local_batches = rows(made.epoch(0)), made.epoch(1)
    begun = rows([next(local_batches) for _ in range(3)])
    state, order = made.state(inside_epoch=True), made.shuffle_order
    expected = begun + rows(local_batches)
    assert first != expected
    assert sorted(first) == sorted(expected)
    keras.utils.set_random_seed(5)  # a process that has used other random numbers
    if from_what == "checkpoint":
        resumed = feed(Augmented(), order=ShuffleOrder(3, keras=True))
        assert state is not None
        resumed.resume_from(state)
    else:
        resumed = feed(Augmented(), order=order)
    assert begun + rows(resumed.epoch(1, skip=3)) == expected
    known = random.getstate()
    resumed.close()
    again = feed(Augmented(), order=resumed.shuffle_order)  # and so do those that follow
    assert begun + rows(again.epoch(1, skip=3)) == expected
    assert random.getstate() == known
    assert rows(again.epoch(2)) != expected


def test_the_next_order_is_drawn_where_random_was_used() -> None:
    """After a resume at an epoch's end, as after the batches of that epoch."""
    made = feed(Augmented(), order=ShuffleOrder(3, keras=True))
    rows(made.epoch(0))
    state = made.state(inside_epoch=False)
    expected = rows(made.epoch(1)), rows(made.epoch(2))
    keras.utils.set_random_seed(5)
    resumed = feed(Augmented(), order=ShuffleOrder(3, keras=True))
    assert state is not None
    resumed.resume_from(state)
    assert (rows(resumed.epoch(1)), rows(resumed.epoch(2))) == expected


def test_a_signal_before_the_first_update_or_within_one() -> None:
    """Batches of it may have been taken."""

    def made() -> Any:
        return feed(Augmented(), order=ShuffleOrder(3, keras=True))

    for taken, at in ((1, 0), (4, 2)):
        data = made()
        list(data.epoch(0))
        local_batches = data.epoch(1)
        seen = rows(islice(local_batches, taken))
        state = data.state(inside_epoch=at > 0)
        expected = (seen + rows(local_batches))[at:]
        resumed = made()
        resumed.resume_from(state)
        assert rows(resumed.epoch(1, skip=at)) == expected


def test_the_state_of_other_data_is_refused() -> None:
    data = feed(Augmented(), order=ShuffleOrder(3, keras=True))
    next(data.epoch(0))
    state = data.state(inside_epoch=True)
    assert state is not None
    other = feed(Augmented(), order=ShuffleOrder(3))
    other.resume_from(state)
    with pytest.raises(CheckpointError, match=r"a PyDataset whose batches .* a PyDataset now"):
        next(other.epoch(0, skip=1))


def test_a_rank_whose_pydataset_has_no_batches() -> None:
    class Empty(Numbers):
        def __len__(self) -> int:
            return 0

    source = PyDatasetSource(Empty(), world=Place(), sliced=False, class_weight=None, prefetch=1)
    assert source.order is None  # as checkpoints ask, on all ranks
    assert list(source.open(0, 0)) == []


def test_without_a_seed_the_batches_of_a_pydataset_depend_on_the_epoch() -> None:
    class InOrder(Numbers):
        def on_epoch_end(self) -> None:
            pass

    made = feed(InOrder(), order=ShuffleOrder(5))
    first, second = rows(made.epoch(0)), rows(made.epoch(1))
    assert first != second
    assert sorted(first) == sorted(second) == rows(feed(InOrder(), shuffle=False).epoch(0))
    assert rows(feed(InOrder(), order=ShuffleOrder(5)).epoch(1)) == second


def test_a_pydataset_is_sliced() -> None:
    local_batches = [list(feed(Numbers(), rank, 3).epoch(0)) for rank in range(3)]
    joined = [flat(step) for step in zip(*[rows(s) for s in local_batches], strict=True)]
    assert joined == rows(feed(Numbers()).epoch(0))
    assert [s.global_examples for s in local_batches[2]].count(8) == 6
    assert min(s.examples for s in local_batches[2]) == 0


def test_worker_processes() -> None:
    made = feed(Numbers(workers=2, use_multiprocessing=True))
    assert sorted(flat(rows(made.epoch(0)))) == list(range(50))
    local_batches = made.epoch(1)
    next(local_batches)
    made.close()


class _Dies(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            os._exit(1)
        return super().__getitem__(index)


def test_a_lost_worker_process_is_an_error() -> None:
    with pytest.raises(BrokenProcessPool):
        list(feed(_Dies(workers=2, use_multiprocessing=True)).epoch(0))


class _Fails(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            return self.lost_picture()
        return super().__getitem__(index)

    def lost_picture(self) -> Any:
        raise KeyError("no such picture")


@pytest.mark.parametrize(
    "options", [{}, {"workers": 2}, {"workers": 1, "use_multiprocessing": True}]
)
def test_the_users_own_error_comes_through(options: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="no such picture") as caught:
        list(feed(_Fails(**options)).epoch(0))
    assert "lost_picture" in "".join(traceback.format_exception(caught.value))


class _Forever(Numbers):
    num_batches = None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return X[:2], np.array([index, index])


def test_an_infinite_pydataset_continues() -> None:
    data = _Forever()
    made = feed(data, limit=3)
    assert [row[0] for row in rows(made.epoch(0))] == [0, 1, 2]
    assert [row[0] for row in rows(made.epoch(1))] == [3, 4, 5]
    assert [row[0] for row in rows(made.epoch(4, skip=1))] == [13, 14]
    assert data.log[:5] == ["end", "begin", "end", "begin", "end"]
    evaluated = feed(_Forever(), limit=3, training=False)
    assert rows(evaluated.epoch(0)) == rows(evaluated.epoch(1))


class _Shaped(Numbers):
    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch

    def __getitem__(self, index: int) -> Any:
        return self.batch


@pytest.mark.parametrize(
    ("batch", "structure"),
    [
        (X, (X,)),
        ([X, Y], (X, Y)),
        ({"a": X}, {"a": X}),
        ((X, [Y, Y], Y), (X, (Y, Y), Y)),
    ],
)
def test_what_a_pydataset_may_return(batch: Any, structure: Any) -> None:
    local_batch = next(feed(_Shaped(batch)).epoch(0))
    tf.nest.assert_same_structure(local_batch.batch, structure)


@pytest.mark.parametrize("batch", [X[0, 0], (X,) * 4, "text"])
def test_what_a_pydataset_must_not_return(batch: Any) -> None:
    with pytest.raises(DataError, match="must return"):
        feed(_Shaped(batch))


def test_class_weights() -> None:
    local_batch = next(feed(Numbers(), class_weight={1: 4.0}).epoch(0))
    numbers, weights = local_batch.batch[1:]
    assert weights.tolist() == [4.0 if number == 1 else 1.0 for number in numbers]
    with pytest.raises(DataError, match="exclude each other"):
        feed(_Shaped((X, Y, Y)), class_weight={1: 4.0})


def generate(count: int = 50, batch: int = 8) -> Iterator[Any]:
    for start in range(0, count, batch):
        stop = min(start + batch, count)
        yield X[start:stop], Y[start:stop]


class _Loader:
    def __iter__(self) -> Iterator[Any]:
        return generate()


@pytest.mark.parametrize("data", [generate, _Loader()])
def test_a_function_is_called_for_every_epoch(data: Any) -> None:
    made = feed(data)
    for epoch in range(3):
        assert flat(rows(made.epoch(epoch))) == list(range(50))
    assert flat(rows(made.epoch(3, skip=2))) == list(range(16, 50))
    assert not made.exhausted
    local_batches = made.epoch(4)
    next(local_batches)
    made.close()


@pytest.mark.parametrize("kind", ["csr_matrix", "csc_array"])
def test_sparse_batches_of_scipy(kind: str) -> None:
    sparse = pytest.importorskip("scipy.sparse", reason="scipy is not installed")

    def made() -> Iterator[Any]:
        return ((getattr(sparse, kind)(x), y) for x, y in generate())

    for rank in range(2):
        ours, theirs = feed(made, rank, 2).epoch(0), feed(generate, rank, 2).epoch(0)
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(tf.sparse.to_dense(one.batch[0]), two.batch[0])


def test_a_function_that_returns_a_dataset() -> None:
    made = feed(lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    assert made.num_batches == 7


def test_a_generator_gives_one_epoch() -> None:
    made = feed(generate())
    assert flat(rows(made.epoch(0))) == list(range(50))
    assert made.exhausted
    assert list(made.epoch(1)) == []
    made.close()


def test_a_generator_with_a_limit_continues() -> None:
    made = feed(generate(), limit=3)
    assert flat(rows(made.epoch(0))) == list(range(24))
    assert not made.exhausted
    assert flat(rows(made.epoch(1, skip=1))) == list(range(32, 48))
    assert flat(rows(made.epoch(2))) == [48, 49]
    assert made.exhausted
    made.close()


@pytest.mark.parametrize(("size", "check"), [(1, True), (2, False)])
@pytest.mark.parametrize("heals", [False, True])
def test_a_function_that_draws_an_order_at_each_call(
    size: int, check: bool, heals: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that heal compare two calls, if there are several and `health.check_data` is on."""
    monkeypatch.setattr(Place, "heals", heals)

    def made() -> Any:
        random = np.random.default_rng(0)

        def batches() -> Iterator[Any]:
            order = random.permutation(50)
            yield from ((x, order[x]) for x in np.split(np.arange(50), 5))

        return feed(batches, 0, size, check=check)

    whole = [rows(made_once.epoch(e)) for made_once in [made()] for e in range(4)]
    resumed = made()
    assert rows(resumed.epoch(2, skip=2)) == whole[2][2:]
    assert rows(resumed.epoch(3)) == whole[3]


class _Reordering:
    """Each pass in an order of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        order = self.random.permutation(50)
        return ((X[order[i : i + 8]], Y[order[i : i + 8]]) for i in range(0, 50, 8))


@pytest.mark.parametrize("make", [_Reordering, lambda: _Reordering().__iter__, Numbers, _Forever])
@pytest.mark.parametrize("looks", [False, True])
def test_validations_before_a_resume_have_drawn_their_orders(make: Any, looks: bool) -> None:
    def validation(passes: int) -> Any:
        made = feed(data := make(), limit=2, training=False)
        if looks:
            made.fingerprint()
            made.peek(1)
        made.replay_passes(passes)
        return made, data

    whole, data = validation(0)
    expected = [rows(whole.epoch(0)) for _ in range(4)]
    for passes in (1, 2):
        resumed, again = validation(passes)
        assert [rows(resumed.epoch(0)) for _ in range(4 - passes)] == expected[passes:]
        resumed.replay_passes(3)  # as at a rollback: these have been made
        assert getattr(again, "log", None) == getattr(data, "log", None)


def test_a_peeked_batch_is_not_lost() -> None:
    made = feed(generate(), 0, 1)
    made.fingerprint()
    assert flat(rows(made.epoch(0))) == list(range(50))


class Refilled(keras.utils.PyDataset):
    """Writes each batch into the arrays of the one before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.arrays = np.zeros((8, 3), np.float32), np.zeros(8, np.int64), np.ones(8)

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        for array in self.arrays:
            array[:] = index
        return self.arrays


def refilled() -> Iterator[Any]:
    data = Refilled()
    yield from (data[index] for index in range(len(data)))


def assigned() -> Iterator[Any]:
    variables = [tf.Variable(array) for array in Refilled().arrays]
    for index in range(7):
        for each in variables:
            each.assign(tf.cast(tf.fill(each.shape, index), each.dtype))
        yield tuple(variables)


@pytest.mark.parametrize("make", [Refilled, lambda: refilled, refilled, lambda: assigned])
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"training": False}, {"rank": 1, "size": 2}])
def test_batches_that_are_written_into_the_same_arrays(make: Any, options: Any) -> None:
    """Those that wait for their step stay as they were made."""
    made = feed(make(), shuffle=False, **options)
    made.fingerprint()
    peeked, seen = made.peek(1), list(made.epoch(0))
    assert set(np.asarray(peeked[1])) == {0}
    for leaf in range(3):
        assert [set(row) for row in rows(seen, leaf)] == [{index} for index in range(7)]
    made.close()


def test_class_weights_of_such_batches() -> None:
    class Pairs(Refilled):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[:2]

    seen = list(feed(Pairs(), shuffle=False, class_weight={3: 2.0}).epoch(0))
    assert [batch.batch[2].tolist() for batch in seen] == [[1.0 + (i == 3)] * 8 for i in range(7)]


def test_lengths_that_vary_widen_the_spec() -> None:
    def sentences() -> Iterator[Any]:
        for length in (3, 3, 5, 7):
            yield np.ones((4, length), np.float32), np.zeros(4)

    made = feed(sentences)
    specs = []
    for _ in made.epoch(0):
        specs.append(made.spec)
    assert [spec[0].shape.as_list() for spec in specs] == [[None, 3]] * 2 + [[None, None]] * 2
    assert specs[0] is specs[1]
    assert specs[2] is specs[3]
    assert not made.uniform


def test_dtypes_are_those_of_the_first_batch() -> None:
    def mixed() -> Iterator[Any]:
        yield np.ones((2, 1), np.float64), np.array([1, 2])
        yield np.ones((2, 1), np.float64), np.array([1, 2])
        yield np.ones((2, 1), np.float32), np.array([1.0, 2.0])

    local_batches = list(feed(mixed).epoch(0))
    assert {local_batch.batch[0].dtype.name for local_batch in local_batches} == {"float64"}
    assert {local_batch.batch[1].dtype.name for local_batch in local_batches} == {"int64"}


def _two_kinds() -> Iterator[Any]:
    yield from generate(24)
    yield X, {"other": Y}


def _two_ranks() -> Iterator[Any]:
    yield from generate(24)
    yield X, Y[:, None]


def _weights_at_last() -> Iterator[Any]:
    yield from [(X, Y, None)] * 2
    yield X, Y, np.ones(len(X))


def _no_weights_at_last() -> Iterator[Any]:
    yield from [(X, Y, np.ones(len(X)))] * 2
    yield X, Y, None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: iter([X]), "must yield tuples"),
        (lambda: iter([(X, 1.0)]), "single number"),
        (lambda: iter(()), "empty"),
        (_two_kinds, "same structure"),
        (_two_ranks, "agree in y"),
        (_weights_at_last, "agree in sample_weight, but one has None"),
        (_no_weights_at_last, "agree in sample_weight, .* another None"),
    ],
)
def test_errors_say_what_is_wrong(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(feed(data).epoch(0))


def test_the_state_of_other_data_is_no_text() -> None:
    with pytest.raises(CheckpointError, match="keeps the order of other data, or of an older"):
        unlabelled("a PyDataset", b"\x00\x01\x02\n", 0, 3)


def test_only_tfdata_can_be_sharded() -> None:
    with pytest.raises(ConfigError, match=r"data\.shard"):
        feed(Numbers(), 0, 2, shard="element")
