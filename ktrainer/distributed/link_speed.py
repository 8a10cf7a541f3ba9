"""The speeds of links between hosts, measured by a few messages."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from ktrainer.distributed.world import World

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm

Speeds = Mapping[tuple[int, int], tuple[float, float]]

_MOST_PAIRS = 28  # of 8 hosts; of more, each is measured with the next one only, or none at all
_BYTES = 2**20
_LEAST_BYTES = 2**16  # where all ranks get each message
_LEAST_SECONDS = 0.005  # by which messages on a slower link take longer
_WHAT = "speed of links"


def link_speeds(world: World) -> Speeds:
    """(seconds one way, bytes a second) between two hosts, by a rank of each; empty where all hosts
    have one name, and of more than 8 hosts without MPI. All ranks call this together."""
    return speeds_between(world, world.allgather(platform.node(), _WHAT))


def slow_link(world: World, before: Speeds, ratio: float) -> tuple[str, bool]:
    """A sentence on the link that has become slower than the others have, and whether its messages
    take `ratio` times as long as before, and `_LEAST_SECONDS` longer. All ranks call this
    together."""
    hosts = world.allgather(platform.node(), _WHAT)
    found = speeds_between(world, hosts)
    if not found:
        return "", False
    then = {pair: before.get(pair, speed) for pair, speed in found.items()}

    def slowed(pair: tuple[int, int]) -> tuple[bool, float]:
        now, usual = _seconds(found[pair]), _seconds(then[pair])
        return now > ratio * usual and now - usual > _LEAST_SECONDS, now / usual

    pair = max(found, key=slowed)
    (latency, speed), (latency_before, speed_before) = found[pair], then[pair]
    where = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in pair)
    which = "the link" if len(found) == 1 else f"of {len(found)} links the one that slowed most"
    return (
        f"{which}, between {where}, takes {latency * 1e3:.3g} ms one way and has "
        f"{speed / 1e6:.3g} MB/s, before {latency_before * 1e3:.3g} ms and "
        f"{speed_before / 1e6:.3g} MB/s",
        slowed(pair)[0],
    )


def _seconds(speed: tuple[float, float]) -> float:
    """What a message of `_BYTES` takes on a link."""
    return max(1e-9, speed[0] + _BYTES / speed[1])


def speeds_between(world: World, hosts: list[str]) -> Speeds:
    """`link_speeds` for the host of each rank."""
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(itertools.combinations(ranks, 2))
    many = len(pairs) > _MOST_PAIRS
    if world.name != "mpi":  # their messages pass through rank 0, or through all ranks
        pairs = [] if many else [(0, rank) for rank in ranks[1:]]
    elif many:
        pairs = [(min(pair), max(pair)) for pair in zip(ranks, ranks[1:] + ranks[:1], strict=True)]
        pairs = pairs[::2] + pairs[1::2]  # else each pair would wait for the one before
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in pairs:
        if world.name != "mpi":
            # All ranks get all messages, so that many ranks have to be content with short ones.
            shared = _BYTES // (len(pairs) * (world.size - 1))
            measured[pair] = _measure(_by_all(world, pair), max(_LEAST_BYTES, shared))
        elif world.rank in pair:
            measured[pair] = _measure(_by_two(cast("MpiComm", world), pair))
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for each in world.allgather(measured, _WHAT):
        for pair, speed in each.items():  # a rank whose messages are buffered sees less of them
            found[pair] = max(found.get(pair, speed), speed, key=_seconds)
    return found


def _by_two(world: MpiComm, pair: tuple[int, int]) -> Callable[[int], float]:
    """The time of messages that two ranks send each other, by their size."""
    from ktrainer.distributed.sum_in_place import exchange  # imports MPI

    (other,) = {*pair} - {world.rank}

    def seconds(size: int) -> float:
        sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        begin = time.perf_counter()
        exchange(world, world.comm, [(other, sent, received)], _WHAT)
        return time.perf_counter() - begin

    return seconds


def _by_all(world: World, pair: tuple[int, int]) -> Callable[[int], float]:
    """The same in a world that has collectives only: the other ranks send nothing."""

    def seconds(size: int) -> float:
        sent = bytes(size if world.rank in pair else 0)
        begin = time.perf_counter()
        world.allgather(sent, _WHAT)
        # All ranks continue by the same time.
        return float(world.oob_allreduce(time.perf_counter() - begin, "max", _WHAT))

    return seconds


def _measure(seconds: Callable[[int], float], size: int = _BYTES) -> tuple[float, float]:
    """Seconds of the shortest message, and bytes of those of `size` a second beyond that."""
    seconds(1)  # they may not arrive together
    short = min(seconds(1) for _ in range(3))
    seconds(size)  # what a limited link lets pass at once has passed then
    long = min(seconds(size) for _ in range(2))
    return short, size / max(long - short, 1e-9)
