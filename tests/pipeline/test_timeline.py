"""The simulator, deadlocks and the grid."""

from __future__ import annotations

import pickle

import pytest

from ktrainer.backends.pipeline.schedules.actions import ScheduleError
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.schedules.schedule_text import schedule_text
from ktrainer.backends.pipeline.schedules.timeline import Costs, make_timeline
from tests.pipeline.schedule_machine import by_hand, run


def times(timeline, rank):
    return [(str(span.action), span.start, span.end) for span in timeline.spans[rank]]


def test_times_by_hand():
    """Stages of 1 and 2; 0.5 to send an activation, 0.25 for a gradient."""
    costs = Costs.of(2, forward=(1, 2), backward=(2, 4), activation=0.5, gradient=0.25)
    timeline = make_timeline(make_schedule("1f1b", 2, 2), costs)
    assert times(timeline, 0) == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 7.75, 9.75), ("0B1", 13.75, 15.75),
    ]  # fmt: skip
    assert times(timeline, 1) == [
        ("1F0", 1.5, 3.5), ("1B0", 3.5, 7.5), ("1F1", 7.5, 9.5), ("1B1", 9.5, 13.5),
    ]  # fmt: skip
    assert timeline.makespan == 15.75
    assert timeline.busy == (6, 12)
    assert timeline.bubble == pytest.approx(1 - 18 / 31.5)


def test_nothing_is_sent_within_a_rank():
    costs = Costs.of(3, activation=100.0)
    timeline = make_timeline(make_schedule("interleaved", 1, 2, 3), costs)
    assert timeline.makespan == 18
    assert timeline.bubble == 0


def test_halves_of_a_backward_pass():
    costs = Costs.of(2, forward=1, backward=5, input_grad=2)
    assert (costs.input_grad, costs.weight_grad) == ((2, 2), (3, 3))
    assert times(make_timeline(make_schedule("zero_bubble", 2, 1), costs), 0) == [
        ("0F0", 0, 1), ("0I0", 4, 6), ("0W0", 6, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "values, words",
    [
        ({"forward": (1, 2)}, "forward needs 3"),
        ({"backward": -1}, "backward needs 3"),
        ({"activation": (1, 2, 3)}, "activation needs 2"),
        ({"gradient": float("nan")}, "gradient needs 2"),
        ({"backward": 1, "input_grad": 2}, "backward - input_grad needs 3"),
    ],
)
def test_wrong_costs_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Costs.of(3, **values)


def test_a_deadlock_names_every_rank_and_its_action():
    """Rank 1 wants microbatch 1 first, rank 0 is at its cap of one."""
    schedule = by_hand("F0 B0 F1 B1", "F1 B1 F0 B0", microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        make_timeline(schedule)
    text = str(caught.value)
    assert "'by hand' deadlocks" in text
    assert "rank 0 waits in 0B0 (its action 2 of 4) for the gradient of stage 1, micro" in text
    assert "rank 1 waits in 1F1 (its action 1 of 4) for the activation of stage 0, micro" in text
    assert "from rank 0" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    assert any(run(schedule))


def test_cutting_the_last_group_short_deadlocks():
    """What `interleaved` avoids: Megatron's warm-up with a last group of less than P."""
    ranks, microbatches, chunks = 4, 5, 3
    groups = [range(4), range(4, 5)]
    texts = []
    for rank in range(ranks):
        fs = [f"{c * ranks + rank}F{m}" for g in groups for c in range(chunks) for m in g]
        bs = [f"{c * ranks + rank}B{m}" for g in groups for c in (2, 1, 0) for m in g]
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(fs))
        order = fs[:warmup]
        for at, backward in enumerate(bs):
            order += [*fs[warmup + at : warmup + at + 1], backward]
        texts.append(" ".join(order))
    schedule = by_hand(*texts, microbatches=microbatches, chunks=chunks)
    assert any(run(schedule))
    with pytest.raises(ScheduleError, match="rank 3 waits in"):
        make_timeline(schedule)
    assert not any(run(make_schedule("interleaved", ranks, microbatches, chunks)))


def test_an_action_that_no_rank_runs_is_a_deadlock():
    with pytest.raises(ScheduleError, match=r"rank 1 waits in 1F1 .* which no rank makes"):
        make_timeline(by_hand("F0", "F0 F1", microbatches=2))


def test_grid():
    assert schedule_text(make_schedule("interleaved", 2, 2, 2)).splitlines() == [
        "rank 0  0F0 0F1 2F0 2F1 .   .   2B0 --- .   2B1 --- 0B0 --- 0B1 ---",
        "rank 1  .   1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1B0 --- 1B1 --- .   .",
        "bubble 20.0%, 15 ticks, live activations 4 3",
    ]


def test_grid_with_other_costs():
    costs = Costs.of(2, forward=2, backward=3, activation=1)
    assert schedule_text(make_schedule("1f1b", 2, 1), costs).splitlines() == [
        "rank 0  F0 -- .  .  .  .  .  .  .  B0 -- --",
        "rank 1  .  .  .  F0 -- B0 -- -- .  .  .  .",
        "bubble 58.3%, 12 ticks, live activations 1 1",
    ]


def test_a_wide_grid_shows_both_ends():
    text = schedule_text(make_schedule("1f1b", 2, 50), columns=6)
    assert text.splitlines()[0] == "rank 0  F0  F1  .   … .   B49 ---"
    assert text.splitlines()[2] == "bubble 2.0%, 153 ticks, live activations 2 1"
    assert schedule_text(make_schedule("1f1b", 2, 1), columns=6) == schedule_text(
        make_schedule("1f1b", 2, 1)
    )


def test_a_grid_has_whole_ticks():
    with pytest.raises(ValueError, match=r"happens at 3\.5"):
        schedule_text(make_schedule("gpipe", 1, 1), Costs.of(1, forward=1.5))


def test_ranks_line_up():
    lines = schedule_text(make_schedule("forward_only", 11, 1)).splitlines()
    assert lines[0].startswith("rank 0   F0")
    assert lines[10] == "rank 10  " + ".  " * 10 + "F0"
    assert lines[11] == "bubble 90.9%, 11 ticks"
