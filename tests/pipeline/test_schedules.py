"""What each schedule promises: its time, what it keeps alive, and that it ends."""

from __future__ import annotations

import itertools
import pickle
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktrainer.backends.pipeline.schedules.actions import (
    Action,
    live_activations,
    microbatches_in_flight,
)
from ktrainer.backends.pipeline.schedules.make_schedule import (
    ALIASES,
    SCHEDULES,
    make_schedule,
    validate_schedule,
)
from ktrainer.backends.pipeline.schedules.timeline import Costs, make_timeline
from ktrainer.errors import ConfigError
from tests.pipeline.schedule_machine import schedules

RANKS, MICROBATCHES = range(1, 7), range(1, 21)
SHAPES = list(itertools.product(RANKS, MICROBATCHES))


def makespan(*args, costs=None):
    return make_timeline(make_schedule(*args), costs).makespan


def test_gpipe_and_1f1b_take_m_plus_p_minus_1_stage_times():
    for ranks, microbatches in SHAPES:
        for name in ("gpipe", "1f1b", "interleaved"):
            assert makespan(name, ranks, microbatches) == 3 * (microbatches + ranks - 1)
        assert makespan("forward_only", ranks, microbatches) == microbatches + ranks - 1


def test_the_bubble_is_what_is_left_of_the_ideal():
    for ranks, microbatches in SHAPES:
        for name in ("gpipe", "1f1b"):
            bubble = make_timeline(make_schedule(name, ranks, microbatches)).bubble
            assert 1 - bubble == pytest.approx(microbatches / (microbatches + ranks - 1))


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
def test_any_costs_give_the_same_formula(ranks, microbatches, forward, backward):
    costs = Costs.of(ranks, forward, backward)
    for name in ("gpipe", "1f1b"):
        expected = (microbatches + ranks - 1) * (forward + backward)
        assert makespan(name, ranks, microbatches, costs=costs) == expected


def test_gpipe_keeps_all_and_1f1b_what_lies_ahead():
    for ranks, microbatches in SHAPES:
        assert live_activations(make_schedule("gpipe", ranks, microbatches)) == (
            (microbatches,) * ranks
        )
        assert live_activations(make_schedule("1f1b", ranks, microbatches)) == tuple(
            min(ranks - stage, microbatches) for stage in range(ranks)
        )
        assert live_activations(make_schedule("forward_only", ranks, microbatches)) == (0,) * ranks


def test_zero_bubble_is_faster_than_1f1b_in_the_same_memory():
    for ranks, microbatches in SHAPES:
        schedule = make_schedule("zero_bubble", ranks, microbatches)
        timeline = make_timeline(schedule)
        few = 2 * ranks + 2 * microbatches - 1  # the weight gradients that fill are missing
        assert timeline.makespan == max(3 * microbatches + ranks - 1, few)
        assert timeline.bubble <= make_timeline(make_schedule("1f1b", ranks, microbatches)).bubble
        assert max(live_activations(schedule)) <= min(ranks, microbatches)


@given(
    st.integers(1, 6), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)
)
def test_zero_bubble_is_no_slower_than_1f1b_at_any_costs(ranks, microbatches, f, i, w):
    costs = Costs.of(ranks, f, i + w, i)
    zero = makespan("zero_bubble", ranks, microbatches, costs=costs)
    assert zero <= makespan("1f1b", ranks, microbatches, costs=costs)


def test_interleaving_shrinks_the_bubble_by_the_number_of_chunks():
    """In stage times: v M + P - 1 a rank, where M is a multiple of P."""
    for ranks, groups, chunks in itertools.product(RANKS, range(1, 6), range(2, 5)):
        schedule = make_schedule("interleaved", ranks, ranks * groups, chunks)
        assert make_timeline(schedule).makespan == 3 * (chunks * ranks * groups + ranks - 1)
        most = 2 * (ranks - 1) + (chunks - 1) * ranks + 1
        assert max(live_activations(schedule)) <= min(most, chunks * ranks * groups)


def test_interleaving_any_number_of_microbatches():
    """No slower than the next multiple of P would be, and from 2 P on no slower than 1F1B."""
    for ranks, microbatches, chunks in itertools.product(RANKS, MICROBATCHES, (2, 3)):
        groups = ceil(microbatches / ranks)
        time = makespan("interleaved", ranks, microbatches, chunks)
        assert time >= 3 * (chunks * microbatches + ranks - 1)
        assert time <= 3 * (chunks * ranks * groups + ranks - 1)
        if microbatches >= 2 * ranks:
            plain = Costs.of(ranks, chunks, 2 * chunks)
            assert time <= makespan("1f1b", ranks, microbatches, costs=plain)


def test_backward_first_stands_late_transfers_better_than_1f1b():
    costs = Costs.of(4, activation=0.5)
    times = {name: makespan(name, 4, 16, costs=costs) for name in ("1f1b", "interleaved")}
    assert times["interleaved"] < times["1f1b"]


def test_backward_first_has_two_more_than_ranks_in_flight_by_default():
    assert microbatches_in_flight(make_schedule("interleaved", 4, 16))[0] == 6
    assert microbatches_in_flight(make_schedule("interleaved", 4, 16, 1, 9))[0] == 9
    assert make_schedule("interleaved", 4, 5) == make_schedule("interleaved", 4, 5, 1, 6)


@given(schedules())
@settings(max_examples=400)
def test_every_schedule_is_complete_ends_and_keeps_its_cap(case):
    schedule, cap = case
    validate_schedule(schedule)
    work = schedule.microbatches * schedule.chunks * (3 if schedule.trains else 1)
    assert make_timeline(schedule).busy == (work,) * schedule.ranks
    flying = microbatches_in_flight(schedule)
    assert all(number <= (cap or schedule.microbatches) for number in flying)
    for alive, number in zip(live_activations(schedule), flying, strict=True):
        assert number <= alive <= number * schedule.chunks


@given(schedules())
def test_microbatches_keep_their_order(case):
    """Then sums over microbatches are the same number under every schedule."""
    schedule, _ = case
    for row in schedule.actions:
        for kind, stage in {(action.kind, action.stage) for action in row}:
            found = [a.microbatch for a in row if (a.kind, a.stage) == (kind, stage)]
            assert found == list(range(schedule.microbatches))


@pytest.mark.parametrize(
    "name, chunks",
    [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)],
)
def test_one_in_flight_is_no_overlap_and_more_are_never_slower(name, chunks):
    for ranks, microbatches in itertools.product(range(1, 5), range(1, 9)):
        caps = [*range(1, 2 * ranks + 2), None]
        times = [makespan(name, ranks, microbatches, chunks, cap) for cap in caps]
        if name != "zero_bubble":
            assert times[0] == 3 * microbatches * ranks * chunks
        assert times == sorted(times, reverse=True)


def test_a_cap_that_does_not_bite_changes_nothing():
    for name, chunks in (("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2), ("gpipe", 1)):
        free = make_schedule(name, 4, 8, chunks)
        assert make_schedule(name, 4, 8, chunks, active_microbatches=8) == free


def test_smp_names():
    assert make_schedule("simple", 2, 4) == make_schedule("gpipe", 2, 4)
    assert make_schedule("_only_forward", 2, 4).name == "forward_only"
    assert set(ALIASES.values()) <= set(SCHEDULES)


def test_schedules_are_values():
    schedule = make_schedule("1f1b", 2, 3)
    assert {schedule, make_schedule("1f1b", 2, 3)} == {schedule}
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert repr(schedule) == "Schedule(name='1f1b', ranks=2, microbatches=3, chunks=1)"
    with pytest.raises(AttributeError):
        schedule.name = "other"
    with pytest.raises(AttributeError):
        Action("F", 0, 0).stage = 1


@pytest.mark.parametrize(
    "args, path, words",
    [
        (("1f1", 2, 4), "backend.schedule", "Did you mean '1f1b'"),
        (("gpype", 2, 4), "backend.schedule", "there are gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 4), "backend.partitions", "1 or more, not 0"),
        (("1f1b", 2, 0), "backend.microbatches", "1 or more, not 0"),
        (("interleaved", 2, 4, 0), "backend.chunks", "1 or more, not 0"),
        (("1f1b", 2, 4, 1, 0), "backend.active_microbatches", "1 or more, not 0"),
        (("forward_only", 2, 4, 1, -1), "backend.active_microbatches", "1 or more, not -1"),
        (("gpipe", 2, 4, 1, 3), "backend.active_microbatches", "use 4 or more"),
        (("simple", 2, 4, 2, 3), "backend.active_microbatches", "as fast with 2"),
        (("1f1b", 2, 4, 2), "backend.chunks", "backend.schedule=interleaved"),
        (("zero_bubble", 2, 4, 3), "backend.chunks", "backend.chunks=1"),
    ],
)
def test_mistakes_are_refused(args, path, words):
    with pytest.raises(ConfigError, match=words) as caught:
        make_schedule(*args)
    assert caught.value.path == path
    assert caught.value.value in args
