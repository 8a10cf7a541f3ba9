"""What ranks send each other: all of it arrives, nothing waits forever, and in which order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from ktrainer.backends.pipeline.schedules.make_schedule import SCHEDULES, make_schedule
from ktrainer.backends.pipeline.schedules.transfers import Transfer, Transfers
from tests.pipeline.schedule_machine import CHUNKED, program, run, schedules


@given(schedules())
@settings(max_examples=400)
def test_with_buffered_sends_and_blocking_receives_every_rank_ends(case):
    schedule, _ = case
    assert not any(run(schedule))


@given(schedules())
def test_transfers_are_those_of_a_pipeline(case):
    """The library's messages against those of the tests' own machine."""
    schedule, _ = case
    transfers = Transfers(schedule)
    for rank, row in enumerate(schedule.actions):
        found = []
        for action in row:
            found += [("receive", *_tag(transfers, t, 0)) for t in transfers.receives(action)]
            found += [("run", action, rank)]
            found += [("send", *_tag(transfers, t, 1)) for t in transfers.sends(action)]
        assert found == program(schedule, rank)


def _tag(transfers, transfer, end):
    kind = "F" if transfer.kind == "activation" else "B"
    return (kind, transfer.source, transfer.microbatch), transfers.ranks(transfer)[end]


@given(schedules())
@settings(max_examples=200)
def test_every_message_is_sent_once_and_received_once(case):
    schedule, _ = case
    transfers = Transfers(schedule)
    actions = [action for row in schedule.actions for action in row]
    sent = [transfer for action in actions for transfer in transfers.sends(action)]
    received = [transfer for action in actions for transfer in transfers.receives(action)]
    assert sorted(sent) == sorted(received)
    assert len(set(sent)) == len(sent)


def test_without_a_cap_on_chunks_order_is_enough():
    for name, ranks, microbatches in itertools.product(SCHEDULES, range(1, 6), range(1, 13)):
        caps = [None] if name == "gpipe" else [None, 1, 2, 4]
        cases = [(1, cap) for cap in caps]
        cases += [(chunks, None) for chunks in (2, 3, 4) if name in CHUNKED]
        for chunks, cap in cases:
            schedule = make_schedule(name, ranks, microbatches, chunks, cap)
            assert not any(run(schedule, tags=False))


def test_a_cap_on_chunks_needs_tags():
    schedule = make_schedule("interleaved", 2, 6, 3, active_microbatches=3)
    with pytest.raises(AssertionError, match="wants"):
        run(schedule, tags=False)
    assert not any(run(schedule))


def test_sends_that_wait_for_their_receiver_deadlock():
    assert any(run(make_schedule("1f1b", 2, 4), buffered=False))
    assert not any(run(make_schedule("forward_only", 3, 4), buffered=False))


def test_neighbours_send_activations_on_and_gradients_back():
    schedule = make_schedule("1f1b", 3, 2)
    transfers = Transfers(schedule)
    first, forward, backward = schedule.actions[0][0], *schedule.actions[1][:3:2]
    assert [str(action) for action in (first, forward, backward)] == ["0F0", "1F0", "1B0"]
    assert transfers.receives(first) == ()
    there, on = Transfer("activation", 0, 1, 0), Transfer("activation", 1, 2, 0)
    assert (transfers.receives(forward), transfers.sends(forward)) == ((there,), (on,))
    come, back = Transfer("gradient", 2, 1, 0), Transfer("gradient", 1, 0, 0)
    assert (transfers.receives(backward), transfers.sends(backward)) == ((come,), (back,))
    assert transfers.ranks(come) == (2, 1)
    assert str(back) == "gradient 1->0 of microbatch 0"


def test_weight_gradients_stay():
    schedule = make_schedule("zero_bubble", 2, 1)
    transfers = Transfers(schedule)
    weights = [action for row in schedule.actions for action in row if action.kind == "W"]
    assert [(transfers.sends(w), transfers.receives(w)) for w in weights] == [((), ())] * 2
