"""Iterators that can be read only once, and the calls that read them one after the other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from ktrainer.data.one_shot_iterator import OneShotReader
from tests.data.feeds import feed, rows

QUIET = {"logging": {"progress": "none", "csv": False}}


def item(number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((4, 1), number, "float32"), np.full((4, 1), number, "float32")


def numbered(count: int, made: list[int] | None = None) -> Iterator[Any]:
    """So many items, then an error."""
    for number in range(count):
        if made is not None:
            made.append(number)
        yield item(number)
    raise ZeroDivisionError


class SetUp:
    """Is set up by `__iter__`."""

    def __iter__(self) -> Iterator[Any]:
        self.items = numbered(9)
        return self

    def __next__(self) -> Any:
        return next(self.items)


class Elsewhere:
    """Has its items in another iterator."""

    def __iter__(self) -> Iterator[Any]:
        return numbered(9)

    def __next__(self) -> Any:
        raise NotImplementedError


def losses(trainer: Trainer, data: Any, epochs: int) -> list[float]:
    """The numbers of the items that a fit is given, by the loss of a model that doubles them."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.layers[0].kernel.assign([[2.0]])
    model.compile(keras.optimizers.SGD(0.0), "mae")
    return list(trainer.fit(model, data, steps_per_epoch=1, epochs=epochs).history["loss"])


def mapped() -> Iterator[Any]:
    """Without weak references."""
    return map(item, range(9))


@pytest.mark.parametrize("make", [lambda: numbered(9), SetUp, Elsewhere, mapped])
def test_two_fits_continue_one_iterator(make: Callable[[], Any]) -> None:
    data = make()
    with Trainer(QUIET) as trainer:
        assert losses(trainer, data, 3) == [0, 1, 2]
        assert losses(trainer, data, 2) == [4, 5]


@pytest.mark.parametrize("make", [lambda: numbered(9), SetUp])
def test_an_iterator_that_was_read_is_released(make: Callable[[], Any]) -> None:
    data = make()
    with Trainer(QUIET) as trainer:
        losses(trainer, data, 1)
    there = weakref.ref(data)
    del data, trainer
    gc.collect()
    assert there() is None


def test_only_the_last_iterators_without_weak_references_are_kept() -> None:
    class Items(list[int]):
        pass

    there = []
    for _ in range(12):
        items = Items([1, 2])
        there.append(weakref.ref(items))
        assert next(OneShotReader(zip(items, strict=True))) == (1,)
    del items
    gc.collect()
    assert [each() is None for each in there] == [True] * 4 + [False] * 8


def test_an_error_that_came_while_reading_ahead_is_raised_by_the_next_fit() -> None:
    data = numbered(5)
    with Trainer(QUIET, overrides=["data.prefetch=4"]) as trainer:
        assert losses(trainer, data, 3) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                losses(trainer, data, 2)


@pytest.mark.parametrize("every", ["40ba", "40ep"])  # before the end of the epoch, and after
def test_a_fit_that_has_ended_leaves_its_items_to_the_next_call(tmp_path: Path, every: str) -> None:
    settings = {**QUIET, "run": {"dir": str(tmp_path)}, "checkpoint": {"every": every}}

    def made_by_fits(count: int) -> list[int]:
        made: list[int] = []
        data = numbered(99, made)
        with Trainer(settings) as trainer:
            assert losses(trainer, data, 40) == list(range(40))
            if count > 1:
                assert losses(trainer, data, 2) == [41, 42]
        return made

    made_by_fits(1)
    assert len(made_by_fits(1)) == 2  # its samples
    assert len(made_by_fits(2)) > 42


def test_a_fit_on_the_same_batches_that_has_ended_leaves_the_next_ones() -> None:
    ended, resumed = numbered(99), numbered(99)
    for data in (ended, resumed):
        made = feed(data, limit=2)
        made.repeat_first_epoch()
        if data is ended:
            for epoch in range(3):
                list(made.epoch(epoch))
        else:
            made.read_up_to(3, 0)
        made.close()
    left = [rows(feed(data, limit=2).epoch(0)) for data in (ended, resumed)]
    assert left[0] == left[1] == [[3] * 4, [4] * 4]


def test_items_that_are_passed_over_are_not_kept() -> None:
    class Item:
        pass

    there = weakref.WeakSet[Item]()

    def make() -> Iterator[Item]:
        while True:
            there.add(one := Item())
            yield one

    data = make()
    OneShotReader(data).use(50)
    assert len(list(islice(OneShotReader(data), 2))) == 2
    assert len(there) < 5
