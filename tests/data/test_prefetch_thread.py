"""The background thread that makes batches ahead of time."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from ktrainer.data.prefetch_thread import Prefetcher, checked_waits, prefetched


def test_an_error_of_the_prefetched_comes_with_its_traceback() -> None:
    def culprit() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    items = Prefetcher(culprit(), 2, "test")
    assert next(items) == 1
    with pytest.raises(OSError, match="disk gone") as caught:
        next(items)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "culprit"
    assert next(items, None) is None
    items.close()


def test_a_prefetcher_stays_within_its_depth_and_closes_the_generator() -> None:
    made: list[int] = []
    closed = threading.Event()

    def count() -> Iterator[int]:
        try:
            for i in range(100):
                made.append(i)
                yield i
        finally:
            closed.set()

    items = Prefetcher(count(), 3, "test")
    time.sleep(0.1)
    assert len(made) <= 4
    assert next(items) == 0
    items.close()
    items.close()
    assert closed.is_set()


@pytest.mark.parametrize("copy", [None, lambda item: item], ids=["made", "copied"])
def test_closing_does_not_wait_for_a_slow_source(copy: Any) -> None:
    """Nor does closing again, as each part of a feed does; and one warning is enough."""
    release = threading.Event()

    def slow() -> Iterator[int]:
        release.wait(30)
        yield 1

    before = set(threading.enumerate())
    items, began = prefetched(slow(), 1, "test", copy), time.monotonic()
    with pytest.warns(UserWarning, match="still computes a batch") as said:
        items.close(timeout=0.05)
    items.close()  # where warnings are errors
    assert (len(said), time.monotonic() - began < 4) == (1, True)
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


def test_nothing_is_computed_while_paused() -> None:
    made: list[int] = []
    enough = threading.Event()

    def slow() -> Iterator[int]:
        for i in range(100):
            time.sleep(0.02)
            made.append(i)
            if i == 2:
                enough.set()
            yield i

    items = Prefetcher(slow(), 50, "test")
    assert enough.wait(30)
    with items.paused(30) as rests:
        assert rests
        before = len(made)
        time.sleep(0.1)
        assert len(made) == before
    assert [next(items) for _ in range(20)] == [*range(20)]
    items.close()


def test_a_pause_does_not_wait_for_ever() -> None:
    release = threading.Event()

    def stuck() -> Iterator[int]:
        release.wait(30)
        yield 1

    items = Prefetcher(stuck(), 1, "test")
    with items.paused(0.05) as rests:
        assert not rests
        release.set()
    assert next(items) == 1
    items.close()


def test_a_wait_that_a_check_ends_loses_nothing() -> None:
    def slow() -> Iterator[int]:
        for i in range(3):
            time.sleep(0.3)
            yield i

    def end() -> None:
        raise KeyboardInterrupt

    found: list[int] = []
    items, unchecked = Prefetcher(slow(), 1, "test"), Prefetcher(slow(), 1, "test", checked=False)
    while len(found) < 3:
        with checked_waits(end), suppress(KeyboardInterrupt):
            found.append(next(items))
    with checked_waits(end):
        assert [*unchecked] == found == [0, 1, 2]
    items.close()
