"""Schedules made by hand: good ones pass, and every mistake is named."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ktrainer.backends.pipeline.schedules.actions import Schedule, ScheduleError
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule, validate_schedule
from tests.pipeline.schedule_machine import by_hand, schedules


def test_a_schedule_may_split_some_backward_passes_only():
    validate_schedule(by_hand("F0 F1 B0 B1", "F0 I0 F1 W0 B1", microbatches=2))
    validate_schedule(by_hand("0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0", microbatches=1, chunks=2))


@pytest.mark.parametrize(
    "texts, words",
    [
        (("F0 B0",), "rows for 1 ranks, not for 2"),
        (("F0 B0", "F0 F0 B0"), "rank 1: stage 1, microbatch 0 runs 1F0 2 times, not once"),
        (("F0 B0", "F0 B0 B0"), "runs 1B0 2 times"),
        (("F0 B0", "B0"), "stage 1, microbatch 0 is never run forward"),
        (("F0 B0", "F0"), "needs one B, or one I and one W, .* has nothing"),
        (("F0 B0", "F0 I0"), "has I"),
        (("F0 W0", "F0 B0"), "has W"),
        (("F0 B0", "F0 B0 W0"), "has B and W"),
        (("F0 B0", "B0 F0"), "order B F: F must come before"),
        (("F0 B0", "F0 W0 I0"), "order F W I: .* I before W"),
        (("F0 B0", "0F0 0B0"), "rank 1: 0F0 belongs on rank 0"),
        (("F0 B0", "F0 B0 F1"), "1F1 is outside of 2 stages and 1 microbatches"),
        (("F0 B0", "F0 B0 3F0"), "3F0 is outside"),
    ],
)
def test_mistakes_are_named(texts, words):
    schedule = by_hand(*texts, microbatches=1)
    with pytest.raises(ScheduleError, match=words):
        validate_schedule(Schedule("by hand", 2, 1, 1, schedule.actions))


def test_a_deadlock_is_a_mistake():
    with pytest.raises(ScheduleError, match="deadlocks"):
        validate_schedule(by_hand("F0 B0 F1 B1", "F1 B1 F0 B0", microbatches=2))


@given(schedules(), st.data())
def test_no_action_can_be_left_out_or_run_twice(case, data):
    schedule, _ = case
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = schedule.actions[rank]
    at = data.draw(st.integers(0, len(row) - 1))
    for changed in (row[:at] + row[at + 1 :], (*row, row[at])):
        actions = (*schedule.actions[:rank], changed, *schedule.actions[rank + 1 :])
        wrong = Schedule("wrong", schedule.ranks, schedule.microbatches, schedule.chunks, actions)
        assume(wrong.trains == schedule.trains)  # without its only B, it is a good forward_only
        with pytest.raises(ScheduleError, match=f"rank {rank}"):
            validate_schedule(wrong)


def test_forward_only_of_a_training_schedule_is_not_trained():
    assert not make_schedule("forward_only", 2, 2).trains
    assert make_schedule("gpipe", 2, 2).trains
