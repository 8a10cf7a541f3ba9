"""Resume positions of tf.data pipelines: the same batches, whatever was random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.checkpoint.contents.data_state import data_states, replicas_of, restore_data
from ktrainer.config import Config
from ktrainer.data import ShuffleOrder, bounds, data_fingerprint, restore_position
from ktrainer.distributed import SingleWorld
from ktrainer.errors import CheckpointError
from ktrainer.state.progress import Progress
from tests.data.feeds import Place, feed, flat, numbered, rows


def shuffled(count: int = 40) -> tf.data.Dataset:
    """In an order that nothing repeats: no seed, the global one neither."""
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(numbered(count)).shuffle(16)
    return data.map(lambda x, y: (x, y), tf.data.AUTOTUNE).batch(4).prefetch(2)


def endless() -> tf.data.Dataset:
    return shuffled().repeat()


def ragged() -> tf.data.Dataset:
    """Not of dense tensors, so that TensorFlow's own iterator is used."""
    return shuffled().map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))


@pytest.mark.parametrize("make", [shuffled, endless, ragged])
@pytest.mark.parametrize(
    ("batch", "epoch", "taken"), [("global", 0, 1), ("per_worker", 0, 9), ("global", 2, 4)]
)
def test_the_rest_of_an_epoch(make: Callable[[], Any], batch: str, epoch: int, taken: int) -> None:
    options: dict[str, Any] = {"batch": batch, "rank": 1, "size": 2, "limit": 10}
    first, again = feed(make(), **options), feed(make(), **options)
    for before in range(epoch):
        list(first.epoch(before))
    local_batches = first.epoch(epoch)
    list(islice(local_batches, taken))
    state = first.state(inside_epoch=True)
    assert state is not None
    again.resume_from(state)
    rest = rows(again.epoch(epoch, skip=taken))
    assert len(rest) == 10 - taken
    assert rest == rows(local_batches)


def test_a_resumed_pipeline_has_a_state_too() -> None:
    one, two, three, four = (feed(shuffled()) for _ in range(4))
    local_batches = one.epoch(0)
    begun = rows(islice(local_batches, 3))
    two.resume_from(one.state(inside_epoch=True))
    others = two.epoch(0, skip=3)
    begun += rows(islice(others, 3))
    three.resume_from(two.state(inside_epoch=True))
    rest = rows(three.epoch(0, skip=6))
    assert sorted(flat([*begun, *rest])) == list(range(40))
    # One that has passed over batches, too.
    passed = four.epoch(0, skip=5)
    list(islice(passed, 2))
    three.resume_from(four.state(inside_epoch=True))
    assert rows(three.epoch(0, skip=7)) == rows(passed)


def test_between_epochs_only_a_stream_has_a_position() -> None:
    finite, stream, again = feed(shuffled()), feed(endless(), limit=5), feed(endless(), limit=5)
    for each in (finite, stream):
        list(each.epoch(0))
    assert finite.state(inside_epoch=False) is None
    again.resume_from(stream.state(inside_epoch=False))
    assert rows(again.epoch(1)) == rows(stream.epoch(1))


def test_a_state_is_for_its_position_alone() -> None:
    whole, other = feed(shuffled()), feed(numbered_batches())
    local_batches = whole.epoch(0)
    list(islice(local_batches, 3))
    other.resume_from(whole.state(inside_epoch=True))
    assert rows(other.epoch(0)) == rows(feed(numbered_batches()).epoch(0))


def test_another_pipeline_is_refused() -> None:
    first, other = feed(shuffled()), feed(numbered_batches())
    local_batches = first.epoch(0)
    list(islice(local_batches, 3))
    other.resume_from(first.state(inside_epoch=True))
    with pytest.raises(CheckpointError, match="epoch 1 cannot continue after batch 3"):
        list(other.epoch(0, skip=3))


def test_states_of_other_replicas_are_ignored() -> None:
    """As many ranks, but in another layout: a prefetch holds slices that were another replica's."""
    first = feed(shuffled())
    local_batches = first.epoch(0)
    list(islice(local_batches, 3))
    world, progress = SingleWorld(), Progress(batch=3)
    arrays = data_states(first, progress, world)
    for replicas, same in (([0], True), ([1], False)):
        again = feed(shuffled())
        restore_data(again, arrays, {"data_replicas": replicas}, world)
        assert (again._cursor._known is not None) is same
    assert replicas_of(world) == [0]


def test_states_that_are_too_long_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktrainer.checkpoint.contents.data_state._MOST_BYTES", 100)
    data = feed(shuffled())
    local_batches = data.epoch(0)
    list(islice(local_batches, 3))
    with pytest.warns(UserWarning, match="checkpoint.iterators=false"):
        assert data_states(data, Progress(batch=3), SingleWorld()) == {}


def test_a_peeked_shuffle_is_not_drawn_once_more() -> None:
    """Ranks compare their first batch before they continue inside the first epoch."""

    def seeded() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(numbered(40)).shuffle(40, seed=3).batch(4)

    whole = rows(feed(seeded()).epoch(0))
    peeked = feed(seeded(), size=2, check=True)
    peeked.fingerprint()
    assert rows(peeked.epoch(0, skip=3)) == [batch[:2] for batch in whole[3:]]


@pytest.mark.quick("7-False-2")
@pytest.mark.parametrize(  # after 7 and 9 batches the prefetch has come to the end
    ("taken", "known", "size"),
    [(2, True, 2), (2, False, 1), (7, True, 1), (7, False, 2), (9, True, 2), (9, False, 1)],
)
def test_the_orders_of_later_epochs_follow(taken: int, known: bool, size: int) -> None:
    def seeded() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(numbered(40)).shuffle(40, seed=3).batch(4)
        return data if known else data.filter(lambda x, y: True)

    first, again = (feed(seeded(), size=size, check=True) for _ in range(2))
    for each in (first, again):
        each.fingerprint()
    local_batches = first.epoch(0)
    list(islice(local_batches, taken))
    if (state := first.state(inside_epoch=True)) is not None:
        again.resume_from(state)
    else:
        assert not known
    assert rows(again.epoch(0, skip=taken)) == rows(local_batches)
    for epoch in (1, 2):
        assert rows(again.epoch(epoch)) == rows(first.epoch(epoch))


def generated() -> tf.data.Dataset:
    def batches() -> Iterator[Any]:
        yield from (numbered(4) for _ in range(5))

    spec = (tf.TensorSpec((4, 3), tf.float32), tf.TensorSpec((4,), tf.int64))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def drawn() -> tf.data.Dataset:
    tf.random.set_seed(None)
    return numbered_batches().map(lambda x, y: (x + tf.random.uniform([]), y))


def numbered_batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(numbered(40)).batch(4)


@pytest.mark.parametrize("make", [generated, drawn, lambda: numbered(40)])
def test_what_has_no_state_is_read_again(make: Callable[[], Any]) -> None:
    data = feed(make(), batch_size=4)
    local_batches = data.epoch(0)
    list(islice(local_batches, 2))
    assert data.state(inside_epoch=True) is None


class Seven(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return numbered(4)[0] + index, np.full(4, index)


def test_an_order_that_was_not_chosen_is_taken_from_the_checkpoint() -> None:
    config = Config()
    for make in (Seven, lambda: numbered(40)):
        first, second = feed(make(), seed=5), feed(make(), seed=6)
        expected = rows(first.epoch(1))
        assert rows(second.epoch(1)) != expected
        state = {"data": data_fingerprint(first, config), "progress": {"epoch": 1, "batch": 2}}
        restore_position(second, config, state)
        assert rows(second.epoch(1, skip=1)) == expected[1:]
        with pytest.raises(CheckpointError, match="seed: 5 then, 6 now"):
            restore_position(feed(make(), order=ShuffleOrder(6, keras=True)), config, state)


def forty_rows(steps: int | None = None, batch_size: int = 4, **options: Any) -> Any:
    """A feed of 40 numbered rows, of which an epoch takes `steps` batches."""
    options |= {"batch_size": batch_size, "batches_per_epoch": steps}
    return feed(numbered(40), shuffle=False, **options)


OWN = {"batch": "per_worker"}


@pytest.mark.parametrize(
    ("then", "epochs", "now"),
    [
        ({"steps": 2}, 1, {"steps": 2}),
        ({"steps": 2}, 1, {"steps": 2, "batch_size": 8}),
        ({"steps": 2}, 1, {"steps": 3}),
        ({"steps": 2}, 1, {}),
        ({}, 1, {"steps": 2}),
        ({}, 1, {"batch_size": 8}),
        ({"steps": 10}, 1, {"steps": 5}),
        ({"steps": 10}, 1, {"steps": 5, "batch_size": 8}),
        ({"steps": 5}, 1, {"steps": 5, "batch_size": 8}),
        ({"steps": 2}, 5, {"steps": 1, "batch_size": 8}),
        ({"steps": 2, "size": 4}, 1, {"steps": 2, "size": 2}),
        ({"steps": 2, "size": 4, **OWN}, 1, {"steps": 2, "size": 2, **OWN}),
        ({"steps": 2, "size": 2, **OWN}, 1, {"steps": 2, "size": 1, "batch_size": 8}),
    ],
)
def test_after_an_epoch_that_ends_inside_a_pass_the_next_row_follows(
    then: dict[str, Any], epochs: int, now: dict[str, Any]
) -> None:
    """Or the resume is refused."""
    first, again, config = forty_rows(**then), forty_rows(**now), Config()
    taken = sum(each.global_examples for epoch in range(epochs) for each in first.epoch(epoch))
    state = {"data": data_fingerprint(first, config), "progress": {"epoch": epochs, "batch": 0}}
    follows = rows(again.epoch(epochs))[0][0] == taken % 40
    with (
        nullcontext()
        if follows
        else pytest.raises(CheckpointError, match=f"end of epoch {epochs}, inside a pass")
    ):
        restore_position(again, config, state)


def test_all_epochs_of_an_iterator_are_inside_its_pass() -> None:
    """Each process has one of its own, whose share depends on their number."""
    config = Config()

    def share(size: int) -> Any:
        batches = (numbered(4) for _ in range(8 // size))
        return feed(batches, size=size, batches_per_epoch=2, **OWN)

    place = {"data": data_fingerprint(share(2), config)}
    for epoch, size in ((0, 4), (1, 2)):
        restore_position(share(size), config, place | {"progress": {"epoch": epoch, "batch": 0}})
    with pytest.raises(CheckpointError, match="processes with data of their own: 2 then, 4 now"):
        restore_position(share(4), config, place | {"progress": {"epoch": 1, "batch": 0}})


def test_the_order_of_fit_continues_on_another_number_of_ranks() -> None:
    """It depends on Python's `random`, whose state is kept once, for all ranks."""
    order = ShuffleOrder(7, keras=True)
    random.seed(7)
    whole = feed(Seven(), order=order)
    expected = [rows(whole.epoch(epoch)) for epoch in range(2)][1]
    random.seed(7)
    first = feed(Seven(), order=order)
    list(first.epoch(0))
    list(islice(first.epoch(1), 3))
    progress, world = Progress(epoch=1, batch=3), SingleWorld()
    arrays = data_states(first, progress, world)
    assert sum(array.nbytes for array in arrays.values()) < 4000
    for rank in range(3):
        random.seed(99)
        place, again = Place(rank, 3), feed(Seven(), rank, 3, order=order)
        restore_data(again, arrays, {"data_replicas": [0]}, place)
        mine = [batch[slice(*bounds(4, rank, 3))] for batch in expected[3:]]
        assert rows(again.epoch(1, skip=3)) == mine
