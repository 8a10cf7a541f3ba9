"""Costs of collectives: closed forms, and a simulation of every message."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from ktrainer.plan.communication_cost import Cost, Group, Link, Network

WITHIN, BETWEEN, ADD = Link(2e-6, 1e-10), Link(5e-5, 8e-9), 3e-11
NETWORK = Network(WITHIN, BETWEEN, add=ADD)
NBYTES = 2.0**21
Message = tuple[int, int, float]  # sender, receiver, bytes


class Simulation:
    """Clocks of ranks that exchange messages in rounds; a host's link carries one at a time."""

    def __init__(self, ranks: int, per_host: int) -> None:
        self.clock, self.per_host = [0.0] * ranks, per_host

    def round(self, messages: Sequence[Message], add: float = 0.0) -> None:
        """Send messages at once; each receiver then adds what it has got, `add` a byte."""
        sent, busy = list(self.clock), defaultdict[tuple[str, int], float](float)
        got = defaultdict[int, float](float)
        for sender, receiver, nbytes in messages:
            local = sender // self.per_host == receiver // self.per_host
            link = WITHIN if local else BETWEEN
            place = ("rank", receiver) if local else ("host", receiver // self.per_host)
            busy[place] += nbytes * link.per_byte
            got[receiver] += nbytes
            start = max(sent[sender], sent[receiver])
            # Shared memory and the network work one after the other, as a core serves both.
            done = start + link.latency + busy[place]
            self.clock[receiver] = max(self.clock[receiver], done)
        for receiver, nbytes in got.items():
            self.clock[receiver] += nbytes * add

    @property
    def end(self) -> float:
        return max(self.clock)


def exchange(ranks: int, per_host: int) -> float:
    run, part = Simulation(ranks, per_host), NBYTES / ranks
    pairs = [(a, b, part) for a in range(ranks) for b in range(ranks) if a != b]
    run.round(pairs, ADD)
    run.clock = [run.end] * ranks
    run.round(pairs)
    return run.end


def ring(ranks: int, per_host: int) -> float:
    run = Simulation(ranks, per_host)
    hop = [(rank, (rank + 1) % ranks, NBYTES / ranks) for rank in range(ranks)]
    for step in range(2 * (ranks - 1)):
        run.round(hop, ADD if step < ranks - 1 else 0.0)
    return run.end


def tree(ranks: int, per_host: int) -> float:
    run, distances = Simulation(ranks, per_host), [2**k for k in range(ranks.bit_length() - 1)]
    for far in distances:
        senders = range(far, ranks, 2 * far)
        run.round([(rank, rank - far, NBYTES) for rank in senders], ADD)
    for far in reversed(distances):
        receivers = range(far, ranks, 2 * far)
        run.round([(rank - far, rank, NBYTES) for rank in receivers])
    return run.end


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("one_host", [True, False])
def test_the_formulas_are_what_messages_add_up_to(ranks, one_host):
    per_host = ranks if one_host else 1
    group = Group.of(range(ranks), per_host)
    for found, simulated in (
        (NETWORK.exchange(group, NBYTES), exchange),
        (NETWORK.ring(group, NBYTES), ring),
        (NETWORK.tree(group, NBYTES), tree),
    ):
        assert found.seconds == pytest.approx(simulated(ranks, per_host), rel=1e-12)


def test_ranks_of_a_host_share_its_link():
    group = Group.of(range(4), 2)
    assert (group.ranks, group.hosts, group.fullest) == (4, 2, 2)
    # Each of two ranks gets a segment from each of two others, over one link.
    cost = NETWORK.exchange(group, NBYTES)
    assert cost.network == pytest.approx(2 * (BETWEEN.latency + NBYTES * BETWEEN.per_byte))
    assert cost.processor == pytest.approx(NBYTES / 4 * (2 * WITHIN.per_byte + 3 * ADD))
    assert NETWORK.tree(Group.of(range(8), 4), NBYTES).network == pytest.approx(
        2 * BETWEEN.message(NBYTES)
    )


def all_reduce(group: Group, engine="mpi", by_host=True, halves=False) -> Cost:
    return NETWORK.all_reduce(group, NBYTES, engine, by_host=by_host, halves=halves)


def test_each_engine_sums_as_it_does():
    flat, two = Group.of(range(4), 1), Group.of(range(4), 2)
    assert all_reduce(Group.of([0], 1)) == Cost()
    assert all_reduce(flat) == NETWORK.exchange(flat, NBYTES)
    assert all_reduce(two, by_host=False) == NETWORK.exchange(two, NBYTES)
    # One sum a host: half of the traffic, and copies within the hosts.
    hierarchical = all_reduce(two)
    assert hierarchical.network == NETWORK.exchange(two.leaders, NBYTES).network
    assert hierarchical.network < all_reduce(two, by_host=False).network
    inside = NETWORK.through_memory(two.on_one_host, NBYTES).processor
    alone = NETWORK.exchange(two.leaders, NBYTES).processor
    assert hierarchical.processor == pytest.approx(alone + inside + WITHIN.message(NBYTES))
    # 16 bits are 32 within a host.
    assert all_reduce(two, halves=True).processor > hierarchical.processor
    # More ranks than exchange segments leave it to MPI, which has no 16-bit floats.
    many = Group.of(range(128), 1)
    assert all_reduce(many) == NETWORK.tree(many, NBYTES)
    assert all_reduce(many, halves=True) == NETWORK.exchange(many, NBYTES)
    # The same on a host: so many ranks share no memory.
    crowd, hosts = Group.of(range(128), 128), Group.of(range(256), 128)
    assert all_reduce(crowd) == NETWORK.tree(crowd, NBYTES)
    assert all_reduce(crowd, halves=True) == NETWORK.exchange(crowd, NBYTES)
    assert all_reduce(hosts).processor > NETWORK.tree(crowd, NBYTES).processor
    # Horovod takes the faster one: rings for large arrays, trees for small ones.
    assert all_reduce(many, "horovod") == NETWORK.ring(many, NBYTES)
    small = NETWORK.all_reduce(many, 8.0, "horovod", by_host=True, halves=False)
    assert small == NETWORK.tree(many, 8.0)


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_ranks_of_one_host_sum_through_its_memory(ranks):
    network = Network(WITHIN, BETWEEN, Link(1e-6, 5e-11), add=ADD)
    part, group, seconds = NBYTES / ranks, Group.of(range(ranks), ranks), 0.0
    for owner in range(ranks):  # the segments, as rank 0 sees them
        written_or_read = 1 if owner == 0 else 2  # its own sum; others' addends and sums
        seconds += part * (written_or_read * 5e-11 + (0 if owner == 0 else ADD))
    found = network.all_reduce(group, NBYTES, by_host=True, halves=False)
    assert found.seconds == pytest.approx(seconds + 2e-6, rel=1e-12)
    assert found.network == 0.0


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_ranks_of_one_host_gather_rows_through_its_memory(ranks):
    network = Network(WITHIN, BETWEEN, Link(1e-6, 5e-11), post=1e-6, crowding=1.5)
    here, apart = Group.of(range(ranks), ranks), Group.of(range(ranks), 1)
    copied = 308 * (1 + ranks)  # a rank writes its own rows, and reads those of all
    found = network.all_gather(here, [8.0, 100.0, 200.0])
    assert found.seconds == pytest.approx(1.5 * (1e-6 + copied * 5e-11), rel=1e-12)
    assert found.network == 0.0
    # Between hosts each array is a message of its own.
    sent = [network.all_gather(apart, [nbytes]) for nbytes in (8.0, 100.0, 200.0)]
    found = network.all_gather(apart, [8.0, 100.0, 200.0])
    assert found.network == pytest.approx(sum(each.network for each in sent))
    assert found.processor == pytest.approx(sum(each.processor for each in sent))


def test_processes_that_share_cores_copy_and_add_more_slowly():
    crowded = Network(WITHIN, BETWEEN, add=ADD, crowding=1.5)
    for group in (Group.of(range(4), 4), Group.of(range(4), 2), Group.of(range(4), 1)):
        alone, slower = NETWORK.exchange(group, NBYTES), crowded.exchange(group, NBYTES)
        assert slower.processor == pytest.approx(1.5 * alone.processor)
        assert slower.network == alone.network


def test_a_message_takes_time_to_post():
    busy = Network(WITHIN, BETWEEN, post=1e-6)
    group = Group.of(range(8), 8)
    gathered = busy.all_gather(group, [100.0], "horovod").seconds
    assert gathered == pytest.approx(WITHIN.latency + 7 * 100 * WITHIN.per_byte + 14e-6)
