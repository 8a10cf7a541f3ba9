"""A clock whose time goes to one share at a time."""

from __future__ import annotations

import threading
import time

import pytest

from ktrainer.state import time_shares
from ktrainer.state.time_shares import TimeShares, communication_of


class Clock:
    """What `TimeShares` reads: its time passes in `sleep` alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_shares, "time", clock)
    return clock


def test_shares_are_exclusive_and_sum_to_the_wall_time(clock: Clock) -> None:
    began, times = clock.now, TimeShares()
    clock.sleep(2)
    times.rest_is("loop")
    with times.of("validation"):
        clock.sleep(3)
        with times.of("data"):
            clock.sleep(4)
        with times.of("validation"):  # inside itself
            clock.sleep(1)
    clock.sleep(5)
    found = times.read()
    assert found == {"start-up": 2, "validation": 4, "data": 4, "loop": 5}
    assert sum(found.values()) == clock.now - began


def test_the_clock_is_that_of_the_wall() -> None:
    began, times = time.perf_counter(), TimeShares()
    time.sleep(0.02)
    sooner, found, later = time.perf_counter(), times.read(), time.perf_counter()
    assert 0.02 <= found["start-up"] <= later - began
    assert TimeShares(began).read()["start-up"] >= sooner - began


def test_an_error_closes_what_it_leaves(clock: Clock) -> None:
    times = TimeShares()
    with pytest.raises(ValueError, match="x"), times.of("compute"), times.of("data"):
        raise ValueError("x")
    clock.sleep(2)
    assert times.read() == {"start-up": 2, "data": 0, "compute": 0}


def test_all_of_healing_is_healing(clock: Clock) -> None:
    times = TimeShares()
    with times.of("healing"), times.of("communication"):
        clock.sleep(1)
    assert times.read() == {"start-up": 0, "healing": 1}


def test_waits_for_other_ranks_at_the_start_are_part_of_it(clock: Clock) -> None:
    times = TimeShares()
    with times.of("communication"), times.of("data"):
        clock.sleep(1)
    with times.of("callback A"), times.of("communication"):
        clock.sleep(2)
    times.rest_is("loop")
    with times.of("communication"):
        clock.sleep(4)
    assert times.read() == {
        "start-up": 2, "data": 1, "callback A": 0, "loop": 0, "communication": 4
    }  # fmt: skip


def test_moved_seconds_are_no_more_than_there_are() -> None:
    times = TimeShares()
    times.seconds |= {"compute": 2.0, "communication": 1.0}
    times.move("compute", "communication", 0.5)
    times.move("communication", "waiting for rank 3", 9.0)
    times.move("compute", "data", -1.0)
    found = times.read()
    assert (found["compute"], found["communication"]) == (1.5, 0.0)
    assert found["waiting for rank 3"] == communication_of(found) == 1.5


def test_what_could_not_be_sent_is_taken_later() -> None:
    times = TimeShares()
    times.seconds["data"] = 1.0
    with pytest.raises(ValueError, match="x"), times.taking() as first:
        raise ValueError("x")
    times.seconds["data"] += 1.0
    with times.taking() as second:
        pass
    times.seconds["data"] += 4.0
    assert (first["data"], second["data"], times.take()["data"]) == (1.0, 2.0, 4.0)


def test_the_time_of_another_thread_is_not_counted() -> None:
    times, seen = TimeShares(), []
    thread = threading.Thread(target=lambda: seen.append(times.in_this_thread))
    thread.start()
    thread.join()
    assert (seen, times.in_this_thread) == ([False], True)


def test_a_share_takes_less_than_a_thousandth_of_a_step_of_10_ms() -> None:
    times, begin = TimeShares(), time.process_time()
    for _ in range(10_000):
        with times.of("data"):
            pass
    assert (time.process_time() - begin) / 10_000 < 1e-5
