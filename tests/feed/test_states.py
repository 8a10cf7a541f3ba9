"""Where a tf.data pipeline stands, told and taken up: the same batches, whatever was random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import tensorflow as tf

from tests.feed.worlds import feed, flat, numbered, rows


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
@pytest.mark.parametrize("options", [{}, {"batch": "per_worker"}], ids=["batch", "per_worker"])
@pytest.mark.parametrize(("epoch", "taken"), [(0, 1), (0, 9), (2, 4)])
def test_the_rest_of_an_epoch(
    make: Callable[[], Any], options: dict[str, Any], epoch: int, taken: int
) -> None:
    options |= {"rank": 1, "size": 2, "limit": 10}
    first, again = feed(make(), **options), feed(make(), **options)
    for before in range(epoch):
        list(first.epoch(before))
    shares = first.epoch(epoch)
    list(islice(shares, taken))
    state = first.state(inside_epoch=True)
    assert state is not None
    again.go_on_from(state)
    rest = rows(again.epoch(epoch, skip=taken))
    assert len(rest) == 10 - taken
    assert rest == rows(shares)


def test_a_pipeline_that_went_on_tells_its_state_as_well() -> None:
    one, two, three, four = (feed(shuffled()) for _ in range(4))
    shares = one.epoch(0)
    begun = rows(islice(shares, 3))
    two.go_on_from(one.state(inside_epoch=True))
    others = two.epoch(0, skip=3)
    begun += rows(islice(others, 3))
    three.go_on_from(two.state(inside_epoch=True))
    rest = rows(three.epoch(0, skip=6))
    assert sorted(flat([*begun, *rest])) == list(range(40))
    # One that has passed over batches, too.
    passed = four.epoch(0, skip=5)
    list(islice(passed, 2))
    three.go_on_from(four.state(inside_epoch=True))
    assert rows(three.epoch(0, skip=7)) == rows(passed)


def test_between_epochs_only_a_stream_stands_anywhere() -> None:
    finite, stream, again = feed(shuffled()), feed(endless(), limit=5), feed(endless(), limit=5)
    for each in (finite, stream):
        list(each.epoch(0))
    assert finite.state(inside_epoch=False) is None
    again.go_on_from(stream.state(inside_epoch=False))
    assert rows(again.epoch(1)) == rows(stream.epoch(1))


def test_a_state_is_for_its_place_alone() -> None:
    whole, other = feed(shuffled()), feed(numbered_batches())
    shares = whole.epoch(0)
    list(islice(shares, 3))
    other.go_on_from(whole.state(inside_epoch=True))
    assert rows(other.epoch(0)) == rows(feed(numbered_batches()).epoch(0))


def test_another_pipeline_is_read_again_and_that_is_said() -> None:
    first, other = feed(shuffled()), feed(numbered_batches())
    shares = first.epoch(0)
    list(islice(shares, 3))
    other.go_on_from(first.state(inside_epoch=True))
    with pytest.warns(UserWarning, match="not the one that the checkpoint was made with; its firs"):
        rest = rows(other.epoch(0, skip=3))
    assert rest == rows(feed(numbered_batches()).epoch(0))[3:]


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
    shares = data.epoch(0)
    list(islice(shares, 2))
    assert data.state(inside_epoch=True) is None
