"""Measurements of links: how many there are, how large, and which link is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ktrainer.distributed import link_speed
from ktrainer.distributed.link_speed import slow_link, speeds_between


class Recorded:
    """A world whose messages are written down.

    Args:
        size: how many ranks it has.
        name: of its kind.
        rank: this one.
    """

    def __init__(self, size: int, name: str, rank: int = 0) -> None:
        self.size, self.name, self.rank = size, name, rank
        self.sent: list[int] = []

    def allgather(self, value: Any, what: str = "") -> list[Any]:
        if isinstance(value, bytes):
            self.sent.append(len(value))
        return [value]

    def oob_allreduce(self, value: Any, op: str, what: str = "") -> Any:
        return value


def hosts_of(number: int) -> list[str]:
    return [f"host{i}" for i in range(number)]


@pytest.mark.parametrize("per_host", [1, 8])
@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_what_all_ranks_get_does_not_grow_with_their_number(hosts: int, per_host: int) -> None:
    """In a world that has collectives only."""
    names = [name for name in hosts_of(hosts) for _ in range(per_host)]
    world: Any = Recorded(len(names), "cluster")
    assert len(speeds_between(world, names)) == hosts - 1
    long = [size for size in world.sent if size > 1]
    assert len(long) == 3 * (hosts - 1)
    if len(names) == 2:
        assert long == [2**20] * 3
    out_of_rank_0 = sum(long) * 2 * (len(names) - 1)
    floor = len(long) * 2 * (len(names) - 1) * 2**16
    assert out_of_rank_0 <= max(6 * 2**20, floor)


def test_collectives_of_many_hosts_are_not_measured() -> None:
    world: Any = Recorded(9, "cluster")
    assert speeds_between(world, hosts_of(9)) == {}
    assert not [size for size in world.sent if size > 1]
    assert slow_link(world, {}, 2.0) == ("", False)


@pytest.mark.parametrize("hosts", [9, 10, 64])
def test_links_of_many_hosts_are_measured_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    found: dict[int, list[tuple[int, int]]] = {}

    def note(world: Any, pair: tuple[int, int]) -> Callable[[int], float]:
        found.setdefault(world.rank, []).append(pair)
        return lambda size: float(size)

    monkeypatch.setattr(link_speed, "_by_two", note)
    for rank in range(hosts):
        world: Any = Recorded(hosts, "mpi", rank)
        speeds_between(world, hosts_of(hosts))
    rounds = 0
    while any(found.values()):  # a pair is measured once it is the next of both
        firsts = [pairs[0] for pairs in found.values() if pairs]
        ready = {pair for pair in firsts if firsts.count(pair) == 2}
        assert ready
        found = {rank: p[1:] if p and p[0] in ready else p for rank, p in found.items()}
        rounds += 1
    assert rounds <= 3


def test_the_link_is_named_that_slowed_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fast one that takes a little longer, but more times as long."""
    before = {(0, 1): (1e-5, 1e9), (0, 2): (1e-3, 100e6)}
    now = {(0, 1): (1e-5, 200e6), (0, 2): (1e-3, 40e6)}
    monkeypatch.setattr(link_speed, "speeds_between", lambda world, hosts: now)
    world: Any = Recorded(3, "mpi")
    world.allgather = lambda value, what: ["a", "b", "c"]
    text, slower = slow_link(world, before, 2.0)
    assert slower
    assert text.startswith("of 2 links the one that slowed most, between rank 0 (a) and rank 2 (c)")
    assert text.endswith("40 MB/s, before 1 ms and 100 MB/s")
    assert not slow_link(world, now, 2.0)[1]
