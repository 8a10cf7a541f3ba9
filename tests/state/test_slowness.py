"""The rules by which something slow is named, on times that are made up."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest

from ktrainer.state.rank_times import Link, Window, medians_of_others, waits_for_last
from ktrainer.state.slowness import AGAIN, NEW_NORMAL, Slow, SlowRules

STEP = 0.02
SLOW_LINK = Link("the link has 1 MB/s", slower=True)


def window(compute: float = STEP, **more: Any) -> Window:
    """A window of a rank; `foo` is the time of a callback."""
    words = {"data": more.pop("data", 0.0), "communication": more.pop("communication", 0.001)}
    seconds = {"compute": compute, **words, "callback Foo": more.pop("foo", 0.0)}
    return Window(seconds, sum(seconds.values()), more.pop("duration", 0.6), **more)


def named(rules: SlowRules, *windows: list[Window], link: Link | None = None) -> list[Slow]:
    """What is named after some windows of all ranks."""
    return [s for number, ranks in enumerate(windows) for s in rules.judge(4 * number, ranks, link)]


def test_nothing_is_slow() -> None:
    rules = SlowRules(0.1, compares=True, several_hosts=True)
    assert named(rules, *[[window(), window(1.2 * STEP)]] * 100) == []
    assert rules.suspects == set()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_wait_for_data_is_named_once_on_the_rank_with_the_longest(ranks: int) -> None:
    rules = SlowRules(0.1, compares=True)
    slow = window(data=0.08, stage="Map of decode, 80 ms a batch")
    every = [window(data=0.03)] * (ranks - 1) + [slow]
    (found,) = named(rules, *[every] * 20)
    who = f"rank {ranks - 1} waits" if ranks > 1 else "the steps wait"
    assert (found.step, found.rank, found.cause) == (4, ranks - 1, "data")
    assert found.message.startswith(f"input is the bottleneck: {who} for data 79% of the time; the")
    assert "Map of decode, 80 ms a batch" in found.message


def test_short_or_small_waits_and_single_windows_are_not_named() -> None:
    rules = SlowRules(0.1)
    assert named(rules, *[[window(data=0.009)]] * 9) == []
    assert named(rules, *[[window(0.2, data=0.02)]] * 9) == []  # less than a tenth
    assert named(rules, *[[window(data=0.08)], [window()]] * 9) == []


def test_a_callback_is_named_again_when_it_was_away_for_long() -> None:
    rules, slow, fast = SlowRules(0.1), [window(foo=0.05)], [window()]
    (found,) = named(rules, slow, slow, *[fast] * (AGAIN - 1), slow, slow)
    assert found.cause == "callback Foo"
    assert "callback Foo takes 50 ms of each step (70%)" in found.message
    assert named(rules, *[fast] * AGAIN, slow, slow) != []


def test_a_callback_on_all_ranks() -> None:
    rules, slow = SlowRules(0.1), window(foo=0.05)
    (found,) = named(rules, *[[slow, slow]] * 2)
    assert "on all ranks" in found.message
    (found,) = named(SlowRules(0.1), *[[window(), slow]] * 2)
    assert (found.rank, "on rank 1" in found.message) == (1, True)


def test_a_rank_that_computes_longer_is_named_with_its_reason() -> None:
    cases = {"cpu": {"cpu": 0.48}, "memory": {"faults": 300.0}, "compute": {"cpu": 0.99}}
    for cause, evidence in cases.items():
        rules = SlowRules(0.1, compares=True)
        slow = [window(), window(2.1 * STEP, **evidence), window()]
        found = named(rules, *[slow] * 2)
        if cause == "compute":  # unexplained: one more window
            assert found == []
            assert rules.suspects == {("compute", 1)}
            found = named(rules, slow)
        (one,) = found
        assert (one.rank, one.cause) == (1, cause)
        assert "rank 1 computes 2.1 x as long as the others (42 ms a step)" in one.message
        assert named(rules, *[slow] * 20) == []
        assert rules.suspects == set()


@pytest.mark.parametrize(
    ("cause", "windows", "evidence"),
    [("cpu", 2, {"cpu": 0.1}), ("memory", 2, {"faults": 300.0}), ("compute", 20, {})],
)
def test_a_rank_that_loses_its_core_for_a_moment_is_not_named(
    cause: str, windows: int, evidence: dict[str, float]
) -> None:
    """As on a machine that others use too: it lasts for 0.1 s, or 1 s where nothing shows why."""
    rules, usual = SlowRules(0.1, compares=True), window(duration=0.05)
    slow = [usual, window(5 * STEP, duration=0.05, **evidence)]
    assert named(rules, *[*[slow] * (windows - 1), [usual] * 2] * 3) == []
    (found,) = named(rules, *[slow] * (windows + 1))
    assert (found.rank, found.cause) == (1, cause)


@pytest.mark.parametrize("cpu", [0.5, None])
def test_a_rank_that_waits_for_its_core_needs_less_of_a_ratio(cpu: float | None) -> None:
    """As under strategies that communicate inside of the step; without a cause it is suspect."""
    rules, slow = SlowRules(0.1, waits_hidden=True), window(1.4 * STEP, cpu=cpu)
    found = named(rules, *[[window()] * 2] * 9, *[[window(1.4 * STEP), slow]] * 2)
    assert [(s.rank, s.cause) for s in found] == ([(1, "cpu")] if cpu else [])
    assert (("compute", 1) in rules.suspects) == (not cpu)


def test_steps_of_ranks_that_wait_unseen_are_compared_as_a_whole() -> None:
    """What a rank without its core loses shows as computing or as communication, by luck."""
    rules, whole = SlowRules(0.1, waits_hidden=True), 1.6 * STEP
    usual, other = window(communication=0.0), window(whole, communication=0.0)
    slow = [window(part * whole, communication=(1 - part) * whole, cpu=0.5) for part in (1, 0.6)]
    (found,) = named(rules, *[[usual] * 2] * 9, *[[other, each] for each in slow])
    assert (found.rank, found.cause) == (1, "cpu")


def test_a_longer_computation_is_named_before_it_is_the_new_past() -> None:
    """With short steps, too."""
    rules, slow = SlowRules(0.1), window(3 * STEP, duration=0.04, cpu=0.5)
    (found,) = named(rules, *[[window()]] * 9, *[[slow]] * 40)
    assert found.cause == "cpu"


def test_ranks_with_unequal_work_are_compared_with_themselves_only() -> None:
    """As the stages of a pipeline: one that has always taken longer is not slow."""
    rules = SlowRules(0.1, compares=False)
    usual = [window(), window(3 * STEP, cpu=0.5)]
    assert named(rules, *[usual] * 30) == []
    (found,) = named(rules, *[[window(), window(9 * STEP, cpu=0.5)]] * 2)
    assert (found.rank, found.cause) == (1, "cpu")
    assert found.message.startswith("steps take 3.0 x as long as before (181 ms): rank 1 got 50%")


def test_a_rank_without_its_core_makes_communication_long_for_all() -> None:
    rules = SlowRules(0.1, compares=True, several_hosts=True)
    slow = [window(communication=0.14, cpu=0.6), window(3 * STEP, communication=0.1, cpu=0.2)]
    (found,) = named(rules, *[[window()] * 2] * 5, *[slow] * 9, link=SLOW_LINK)
    assert (found.rank, found.cause) == (1, "cpu")
    waits = [window(communication=0.1, cpu=0.6), window(communication=0.1)]
    assert named(rules, *[waits] * 9) == []  # rank 1 is known, and no longer looked at


@pytest.mark.parametrize("share", ["data", "foo"])
def test_a_wait_for_another_rank_that_looks_like_computing_is_not_named(share: str) -> None:
    """As inside of Horovod, whose threads share the processors with those that compute."""
    rules, late = SlowRules(0.1, waits_hidden=True), window(**{share: 0.06})
    found = named(rules, *[[window()] * 2] * 9, *[[window(4 * STEP, cpu=0.4), late]] * 9)
    assert [slow.rank for slow in found] == [1]


def test_a_longer_computation_is_the_new_past_if_nothing_explains_it() -> None:
    """As of longer sequences, on one process."""
    rules = SlowRules(0.1)
    assert named(rules, *[[window()]] * 9, *[[window(3 * STEP, cpu=0.98)]] * 80) == []
    assert rules.suspects == set()
    assert NEW_NORMAL < 80


def test_a_slow_link_is_named_once_it_is_measured() -> None:
    """Also if ranks that wait for messages share their cores."""
    rules = SlowRules(0.1, compares=True, several_hosts=True)
    usual, slow = [window()] * 2, [window(communication=0.1, cpu=0.4)] * 2
    assert named(rules, *[usual] * 5, slow) == []
    assert ("link", None) in rules.suspects
    (found,) = named(rules, slow, link=SLOW_LINK)
    assert (found.rank, found.cause) == (None, "link")
    assert "takes 100.0 x as long as before (100 ms a step), though no rank" in found.message
    assert found.message.endswith("the link has 1 MB/s")
    assert named(rules, *[slow] * 9) == []


def test_a_slow_link_behind_long_computing_is_named_if_it_was_measured_to_be_slower() -> None:
    """As of Horovod."""
    rules = SlowRules(0.1, several_hosts=True, waits_hidden=True)
    usual, slow = [window()] * 2, [window(4 * STEP), window(4 * STEP, cpu=0.9)]
    as_before = Link("the link has 900 MB/s", slower=False)
    assert named(rules, *[usual] * 5, *[slow] * 4, link=as_before) == []
    assert ("link", None) in rules.suspects
    (found,) = named(rules, slow, link=SLOW_LINK)
    assert (found.rank, found.cause) == (None, "link")
    assert "steps take 3.9 x as long as before (81 ms) on all ranks: the link" in found.message


@pytest.mark.parametrize("late", [{"data": 3 * STEP}, {"foo": 3 * STEP}])
def test_a_rank_that_waits_hidden_for_another_does_not_suspect_the_link(
    late: dict[str, float],
) -> None:
    rules = SlowRules(0.1, several_hosts=True, waits_hidden=True)
    named(rules, *[[window()] * 2] * 5, *[[window(4 * STEP), window(**late)]] * 4, link=SLOW_LINK)
    assert ("link", None) not in rules.suspects


def test_ranks_that_wait_for_one_do_not_blame_the_link() -> None:
    rules = SlowRules(0.1, compares=True, several_hosts=True)
    late = [window(communication=0.2), window(11 * STEP, cpu=0.3)]
    found = named(rules, *[[window()] * 2] * 5, *[late] * 9, link=SLOW_LINK)
    assert [slow.cause for slow in found] == ["cpu"]
    assert named(SlowRules(0.1), *[[window()]] * 5, *[[window(communication=0.1)]] * 9) == []


def test_of_an_epoch_the_largest_share_is_named() -> None:
    rules = SlowRules(0.1)
    rows = [
        {"seconds": 10.0, "data": 4.0, "callback Foo": 1.5, "compute": 4.5},
        {"seconds": 10.0, "waiting for rank 0": 5.0, "compute": 5.0},
    ]
    first = rules.judge_epoch(9, 1, rows, ["", ""])
    assert first is not None
    assert (first.rank, first.cause) == (0, "waiting")
    assert "in epoch 1 rank 1 waited for rank 0 50% of the time, 5.0 s" in first.message
    second = rules.judge_epoch(18, 2, rows, ["a map, 3 ms a batch", ""])
    assert second is not None
    assert "in epoch 2 rank 0 waits for data 40% of the time; the slowest" in second.message
    third = rules.judge_epoch(27, 3, rows, ["", ""])
    assert third is not None
    assert third.message == "callback Foo took 15% of epoch 3 on rank 0, 1.5 s"
    assert rules.judge_epoch(36, 4, rows, ["", ""]) is None


def test_a_wait_for_a_rank_that_is_known_to_be_slow_is_not_named() -> None:
    rules = SlowRules(0.1, compares=True)
    named(rules, *[[window(), window(5 * STEP, cpu=0.5)]] * 2)
    rows = [{"seconds": 10.0, "waiting for rank 1": 8.0}, {"seconds": 10.0, "compute": 10.0}]
    assert rules.judge_epoch(9, 1, rows, ["", ""]) is None


def test_short_and_small_shares_of_an_epoch_are_not_named() -> None:
    rows = [{"seconds": 2.0, "data": 0.9}, {"seconds": 100.0, "callback Foo": 5.0}]
    rows += [{"seconds": 10.0, "waiting for rank 0": 1.9}]
    assert SlowRules(0.1).judge_epoch(9, 1, rows, ["", "", ""]) is None


def test_what_is_waited_for_is_the_rank_that_waits_least() -> None:
    assert waits_for_last([0.5, 0.25, 1.25]) == (1, [0.25, 0.0, 1.0])
    assert waits_for_last([0.5]) == (0, [0.0])


@pytest.mark.parametrize("values", [[2.0], [1.0, 2.0], [3.0, 1.0, 2.0], [1.0, 1.0, 4.0, 2.0, 9.0]])
def test_the_median_of_the_others(values: list[float]) -> None:
    others = [values[:i] + values[i + 1 :] for i in range(len(values))]
    assert medians_of_others(values) == [median(o) if o else math.inf for o in others]
