"""The slowest link between hosts, measured by a few messages."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from ktrainer.distributed.host_groups import host_name
from ktrainer.distributed.sum_in_place import exchange
from ktrainer.distributed.world import World

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm

_MOST_PAIRS = 28  # of 8 hosts; with more hosts each is measured with the next one only
_BYTES = 2**16
_WHAT = "speed of links"


def slowest_link(world: World) -> str:
    """A sentence on the slowest link between two hosts, by messages between one rank of each;
    empty where all hosts have one name. All ranks call this together."""
    hosts = world.allgather(host_name(), _WHAT)
    ranks = [hosts.index(host) for host in dict.fromkeys(hosts)]
    pairs = list(itertools.combinations(ranks, 2))
    if len(pairs) > _MOST_PAIRS:
        pairs = [(min(pair), max(pair)) for pair in zip(ranks, ranks[1:] + ranks[:1], strict=True)]
    mine = [pair for pair in pairs if world.rank in pair]
    measured = {pair: _measure(cast("MpiComm", world), pair) for pair in mine}
    found = {k: v for each in world.allgather(measured, _WHAT) for k, v in each.items()}
    if not found:
        return ""
    (one, other), (latency, seconds) = max(found.items(), key=lambda item: item[1][1])
    where = f"rank {one} ({hosts[one]}) and rank {other} ({hosts[other]})"
    slowest = "the link" if len(found) == 1 else f"the slowest of {len(found)} links"
    return (
        f"{slowest}, between {where}, takes {latency * 1e3:.3g} ms one way and has "
        f"{_BYTES / max(seconds, 1e-9) / 1e6:.3g} MB/s"
    )


def _measure(world: MpiComm, pair: tuple[int, int]) -> tuple[float, float]:
    """Seconds of the shortest message between two ranks, and of `_BYTES` beyond that."""
    (other,) = {*pair} - {world.rank}

    def seconds(size: int) -> float:
        sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        begin = time.perf_counter()
        exchange(world, world.comm, [(other, sent, received)], _WHAT)
        return time.perf_counter() - begin

    seconds(1)  # they may not arrive together
    short = min(seconds(1) for _ in range(3))
    return short, max(0.0, min(seconds(_BYTES) for _ in range(2)) - short)
