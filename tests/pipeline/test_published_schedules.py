"""The papers' schedules written out by hand: 4 ranks, 8 microbatches, counted from 1 as there."""

from __future__ import annotations

import pytest

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.schedules.timeline import Costs, make_timeline


def order(schedule, rank):
    """As the papers print it: the numbers of the microbatches, chunks after the first marked."""
    return " ".join(
        f"{action.kind.lower()}{action.microbatch + 1}{chr(39) * (action.stage // schedule.ranks)}"
        for action in schedule.actions[rank]
    )


def test_gpipe():
    """Huang et al. 2019, figure 2c; backward passes in forward order, see `gpipe`."""
    schedule = make_schedule("gpipe", 4, 4)
    assert {order(schedule, rank) for rank in range(4)} == {"f1 f2 f3 f4 b1 b2 b3 b4"}


def test_1f1b():
    """Narayanan et al. 2021, figure 4, top."""
    schedule = make_schedule("1f1b", 4, 8)
    assert order(schedule, 0) == "f1 f2 f3 f4 b1 f5 b2 f6 b3 f7 b4 f8 b5 b6 b7 b8"
    assert order(schedule, 1) == "f1 f2 f3 b1 f4 b2 f5 b3 f6 b4 f7 b5 f8 b6 b7 b8"
    assert order(schedule, 2) == "f1 f2 b1 f3 b2 f4 b3 f5 b4 f6 b5 f7 b6 f8 b7 b8"
    assert order(schedule, 3) == "f1 b1 f2 b2 f3 b3 f4 b4 f5 b5 f6 b6 f7 b7 f8 b8"


def test_interleaved():
    """Narayanan et al. 2021, figure 4, bottom: two chunks; the second is marked."""
    schedule = make_schedule("interleaved", 4, 8, chunks=2)
    assert order(schedule, 0) == (
        "f1 f2 f3 f4 f1' f2' f3' f4' f5 f6 f7 b1' f8 b2' f5' b3' f6' b4' f7' b1 f8' b2 "
        "b3 b4 b5' b6' b7' b8' b5 b6 b7 b8"
    )
    assert order(schedule, 3) == (
        "f1 f2 f3 f4 f1' b1' f2' b2' f3' b3' f4' b4' f5 b1 f6 b2 f7 b3 f8 b4 "
        "f5' b5' f6' b6' f7' b7' f8' b8' b5 b6 b7 b8"
    )


def test_zero_bubble():
    """Qi et al. 2023, figure 3, top (ZB-H1); B there is I here."""
    schedule = make_schedule("zero_bubble", 4, 8)
    assert order(schedule, 0) == (
        "f1 f2 f3 f4 i1 w1 f5 i2 w2 f6 i3 w3 f7 i4 w4 f8 i5 w5 i6 w6 i7 w7 i8 w8"
    )
    assert order(schedule, 3) == (
        "f1 i1 f2 i2 f3 i3 f4 i4 w1 f5 i5 w2 f6 i6 w3 f7 i7 w4 f8 i8 w5 w6 w7 w8"
    )


@pytest.mark.parametrize("forward, input_grad, weight_grad", [(1, 1, 1), (2, 2, 1), (3, 4, 2)])
def test_the_bubble_of_zb_h1(forward, input_grad, weight_grad):
    """As stated there: (P - 1)(F + B - W), against (P - 1)(F + B + W) of 1F1B."""
    costs = Costs.of(4, forward, input_grad + weight_grad, input_grad)
    for name, each in (("zero_bubble", -weight_grad), ("1f1b", weight_grad)):
        timeline = make_timeline(make_schedule(name, 4, 12), costs)
        idle = timeline.makespan - 12 * (forward + input_grad + weight_grad)
        assert idle == 3 * (forward + input_grad + each)
