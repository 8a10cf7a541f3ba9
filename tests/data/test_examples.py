"""Random access: rows by a pure function of seed, epoch and index, by each library's own API."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ktrainer.checkpoint.format.checkpoint_reader import read_checkpoint
from ktrainer.data import Examples, ShuffleOrder
from ktrainer.data.data_arguments import kind_of
from ktrainer.data.shuffling import TABLED, permuted
from ktrainer.errors import DataError
from tests.data import sequence_script
from tests.data.feeds import feed, flat, numbered
from tests.data.sequence_script import Source, digest, sequence
from tests.dist.harness import Ranks
from tests.faults.test_healing import launch

X, Y = numbered(40)
PAIRS = [(x, y) for x, y in zip(X, Y, strict=True)]


class Pairs:
    """The least that there must be."""

    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, row: int) -> Any:
        return PAIRS[row]


def of_torch(folder: Path) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))


def of_hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # else its thread stays
    columns = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    return Examples(columns, lambda item: (item["x"], item["y"]))


def of_grain(folder: Path) -> Any:
    grain = pytest.importorskip("grain", reason="grain is not installed")
    return grain.MapDataset.source(range(40)).map(lambda row: PAIRS[row])


def of_array_record(folder: Path) -> Any:
    record = pytest.importorskip("array_record", reason="array_record is not installed")
    assert record
    from array_record.python import array_record_data_source, array_record_module

    path = str(folder / "rows.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for x, y in PAIRS:
        writer.write(x.tobytes() + np.int64(y).tobytes())
    writer.close()
    source = array_record_data_source.ArrayRecordDataSource(path)
    return Examples(
        source, lambda b: (np.frombuffer(b[:-8], np.float32), np.frombuffer(b[-8:], np.int64)[0])
    )


LIBRARIES = [of_torch, of_hugging_face, of_grain, of_array_record, lambda folder: Pairs()]


@pytest.mark.parametrize("make", LIBRARIES, ids=["torch", "hf", "grain", "array_record", "own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_batches_of_arrays(make: Callable[[Path], Any], workers: int, tmp_path: Path) -> None:
    data = make(tmp_path)
    if workers:
        given = data if isinstance(data, Examples) else Examples(data)
        data = Examples(given.source, given.transform, workers=workers)
    assert kind_of(data) == "random access"
    for options in ({}, {"shuffle": False}, {"shuffle": "batch"}, {"batch": "per_worker"}):
        for rank in range(2):
            ours = feed(data, rank, 2, batch_size=7, seed=4, **options)
            theirs = feed((X, Y), rank, 2, batch_size=7, seed=4, **options)
            assert ours.spec == theirs.spec
            for one, two in zip(ours.epoch(1, 2), theirs.epoch(1, 2), strict=True):
                np.testing.assert_array_equal(one.batch[0], two.batch[0])
                np.testing.assert_array_equal(one.batch[1], two.batch[1])
                assert (one.examples, one.global_examples) == (two.examples, two.global_examples)
            assert ours.state(inside_epoch=True) is None
            ours.close()


def test_batches_of_grain_are_batches(tmp_path: Path) -> None:
    """As in Keras, also those that are `x` alone."""
    pairs = of_grain(tmp_path)
    batched = pairs.batch(7)
    loaded = pairs.to_iter_dataset().batch(7)
    for data in (batched, batched.map(lambda batch: batch), loaded):
        assert kind_of(data) == "generator"
        for rank in range(2):
            ours, theirs = feed(data, rank, 2), feed((X, Y), rank, 2, batch_size=7, shuffle=False)
            for skip in (0, 3):
                for one, two in zip(ours.epoch(1, skip), theirs.epoch(1, skip), strict=True):
                    np.testing.assert_array_equal(one.batch[0], two.batch[0])
                    np.testing.assert_array_equal(one.batch[1], two.batch[1])
            ours.close()
    for alone in (lambda pair: pair[0], lambda pair: {"x": pair[0]}, lambda pair: [pair[0]]):
        first = next(feed(pairs.map(alone).batch(7), training=False).epoch(0)).batch
        leaves = keras.tree.flatten(first)
        np.testing.assert_array_equal(leaves[0], X[:7])
    for endless in (batched.repeat(), pairs.repeat().batch(7)):
        assert feed(endless).infinite
    assert not feed(batched).infinite


@settings(max_examples=60)
@given(length=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutations(length: int, key: int) -> None:
    places = permuted(np.arange(length), length, np.uint64(key))
    assert sorted(places.tolist()) == list(range(length))
    some = np.arange(length)[:: max(1, length // 7)]
    np.testing.assert_array_equal(permuted(some, length, np.uint64(key)), places[some])


@pytest.mark.parametrize("within", [False, True])
def test_an_order_too_long_for_a_table(within: bool) -> None:
    length, order = TABLED + 77, ShuffleOrder(3)
    whole = order.rows(1, length, 1000, within)[0:length]
    assert (np.sort(whole) == np.arange(length)).all()
    for begin in (0, TABLED // 2 + 1, length - 5000):
        piece = slice(begin, begin + 5000)
        np.testing.assert_array_equal(order.rows(1, length, 1000, within)[piece], whole[piece])
    assert (whole[:50000] != order.rows(2, length, 1000, within)[0:50000]).mean() > 0.99
    if within:
        assert (whole // 1000 == np.arange(length) // 1000).all()
    else:  # neighbours go anywhere: as many into each hundredth as chance has it
        steps = (np.diff(whole) % length) * 100 // length
        assert abs(np.bincount(steps) - length / 100).max() < 6 * (length / 100) ** 0.5


@pytest.mark.parametrize("batch", [1, 32])
def test_index_10_to_the_8_in_less_than_a_second(batch: int) -> None:
    whole_numbers = Examples(Source(2 * 10**8), lambda item: item.astype(np.int64))
    whole = feed(whole_numbers, batch_size=batch)
    begin = time.process_time()
    taken = whole.epoch(3, skip=10**8 // batch)
    first = next(iter(taken))
    assert time.process_time() - begin < 1.0
    again = ShuffleOrder(0).rows(3, 2 * 10**8, batch, False)[10**8 : 10**8 + batch]
    assert first.batch[:, 0].tolist() == again.tolist()
    taken.close()  # type: ignore[attr-defined]
    whole.close()


def test_a_rank_reads_its_own_examples_only() -> None:
    source = Source(100)
    mine = feed(source, 1, 4, batch_size=20, prefetch=0)
    source.read = 0
    list(mine.epoch(0))
    assert source.read == 25


def test_random_numbers_belong_to_epoch_and_index() -> None:
    data = Examples(Source(), sequence_script.augmented, random=True)

    def noise(rank: int, size: int, epoch: int, **options: Any) -> dict[int, list[float]]:
        made = feed(data, rank, size, seed=5, **options)
        found = [row for each in made.epoch(epoch) for row in each.batch[0][: each.examples]]
        made.close()
        return {int(row[0]): row.tolist() for row in found}

    one = noise(0, 1, 2)
    assert noise(0, 2, 2, shuffle=False) | noise(1, 2, 2, shuffle=False) == one
    assert noise(0, 1, 3) != one


class Items:
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def test_examples_of_all_kinds() -> None:
    items = Items({"a": b"x\0", "b": 1}, {"a": b"yz\0\0", "b": 2})
    (batch,) = feed(items, shuffle=False).epoch(0)
    assert batch.batch["a"].numpy().tolist() == [b"x\0", b"yz\0\0"]
    assert batch.batch["b"].dtype == np.int64
    pairs = Items(([1.5], 0), ([2.5], 1))
    (batch,) = feed(pairs, shuffle=False, class_weight={1: 3.0}).epoch(0)
    assert batch.batch[2].tolist() == [1, 3]
    assert batch.batch[0][0].dtype == np.float32
    (batch,) = feed(Items((tf.ones([2]), None)), shuffle=False).epoch(0)
    assert batch.batch[1] is None


REFUSED = [
    (Items(), "no examples"),
    (Items(None), "example 0 of the data set is None"),
    (Items((1, 2, 3, 4)), "example 0 is a tuple of 4"),
    (Items(np.ones(3), np.ones(4)), r"examples \[0, 1\] are unlike"),
    (Items(np.ones(3), (np.ones(3),)), r"examples \[0, 1\] are unlike"),
    (Items(1, 0.5), r"are x: float32\[None\], but the first is x: int64"),
]


@pytest.mark.parametrize(("data", "says"), REFUSED)
def test_what_is_refused(data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        list(feed(data, shuffle=False, prefetch=0).epoch(0))
    with pytest.raises(DataError, match="lacks one of them"):
        Examples(iter([1]))
    with pytest.raises(DataError, match="needs a transform"):
        Examples(Items(1), random=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[list[int]]]:
    """Weights and sequence of one process."""
    folder, floatx = tmp_path_factory.mktemp("alone"), keras.config.floatx()
    weights = sequence_script.train(str(folder))
    keras.config.set_floatx(floatx)
    found = sequence(folder)
    assert [sorted(flat(found[i : i + 11])) for i in (0, 11, 22)] == [list(range(103))] * 3
    assert found[:11] != found[11:22]
    return weights, found


@pytest.mark.quick("2-3")
@pytest.mark.parametrize(("size", "other"), [(4, 1), (2, 3)])
def test_the_global_sequence_on_any_number_of_ranks(
    ranks: Callable[..., Ranks], size: int, other: int, alone: Any, tmp_path: Path
) -> None:
    """To the middle of an epoch on one number of ranks, and to the end on another."""
    weights, expected = alone
    run = tmp_path / "run"
    words = ["backend=data_parallel", f"run.dir={run}", "checkpoint.every=5ba"]
    begun, rest, train = tmp_path / "begun", tmp_path / "rest", sequence_script.train
    ranks(size).run(train, str(begun), *words, "trainer.max_steps=15", deadline=120)
    for saved in (run / "checkpoints").glob("step-*"):
        arrays, state = read_checkpoint(saved)
        assert not [name for name in arrays if name.startswith("data/")]
        assert len(json.dumps([state["data"], state["progress"]])) < 1000  # bytes
    found = ranks(other).run(train, str(rest), *words, deadline=120)[0]
    for mine, wanted in zip(found, weights, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-10)
    assert sequence(begun) == expected[:15]
    assert digest(sequence(begun, rest)) == digest(expected)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_global_sequence_while_ranks_are_lost(alone: Any, tmp_path: Path) -> None:
    faults = ["2:7:before", "0:14:in", "1:20:after"]
    script = str(Path(sequence_script.__file__))
    ended = launch(tmp_path, "--heal", "-n", "4", script, str(tmp_path), *faults)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr.count("was lost") == 3
    _compare(tmp_path, *alone)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_global_sequence_while_ranks_join(tmp_path: Path) -> None:
    alone, longer, floatx = tmp_path / "alone", "trainer.epochs=40", keras.config.floatx()
    weights = sequence_script.train(str(alone), longer)
    keras.config.set_floatx(floatx)
    script, folder = str(Path(sequence_script.__file__)), tmp_path / "joined"
    words = ["--replace", "-n", "2", script, str(folder), "1:5:before", "0:16:joined"]
    ended = launch(tmp_path, *words, settings=longer)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "a rank joined; 2 ranks continue" in ended.stderr
    _compare(folder, weights, sequence(alone))


def _compare(folder: Path, weights: list[Any], expected: list[list[int]]) -> None:
    assert digest(sequence(folder)) == digest(expected)
    with np.load(folder / "weights.npz") as found:
        for name, wanted in zip(found.files, weights, strict=True):
            np.testing.assert_allclose(found[name], wanted, rtol=1e-10)
