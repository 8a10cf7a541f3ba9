"""A clock whose time goes to one share at a time."""

from __future__ import annotations

import threading
import time

import pytest

from ktrainer.state.time_shares import TimeShares, communication_of


def test_shares_are_exclusive_and_sum_to_the_wall_time() -> None:
    began, times = time.perf_counter(), TimeShares()
    time.sleep(0.02)
    times.rest_is("loop")
    with times.of("validation"):
        time.sleep(0.03)
        with times.of("data"):
            time.sleep(0.04)
        with times.of("validation"):  # inside itself
            time.sleep(0.01)
    time.sleep(0.02)
    found, wall = times.read(), time.perf_counter() - began
    assert sum(found.values()) == pytest.approx(wall, abs=1e-3)
    least = {"start-up": 0.02, "validation": 0.04, "data": 0.04, "loop": 0.02}
    assert found.keys() == least.keys()
    assert all(found[share] >= seconds for share, seconds in least.items())


def test_an_error_closes_what_it_leaves() -> None:
    times = TimeShares()
    with pytest.raises(ValueError, match="x"), times.of("compute"), times.of("data"):
        raise ValueError("x")
    before = times.read()
    time.sleep(0.01)
    after = times.read()
    assert after["start-up"] - before["start-up"] >= 0.01
    assert (after["data"], after["compute"]) == (before["data"], before["compute"])


def test_all_of_healing_is_healing() -> None:
    times = TimeShares()
    with times.of("healing"), times.of("communication"):
        time.sleep(0.01)
    found = times.read()
    assert found["healing"] >= 0.01
    assert "communication" not in found


def test_waits_for_other_ranks_at_the_start_are_part_of_it() -> None:
    times = TimeShares()
    with times.of("communication"), times.of("data"):
        time.sleep(0.01)
    with times.of("callback A"), times.of("communication"):
        time.sleep(0.01)
    times.rest_is("loop")
    with times.of("communication"):
        time.sleep(0.01)
    found = times.read()
    assert found["data"] >= 0.01
    assert 0.01 <= found["communication"] < 0.02
    assert found["start-up"] >= 0.01


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
