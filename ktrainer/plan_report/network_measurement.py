"""Latency and bandwidth between ranks, measured with what sums gradients."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ktrainer.distributed.host_groups import host_name
from ktrainer.distributed.shared_memory import open_shared_memory
from ktrainer.distributed.sum_in_place import PIECE_BYTES, add_up, exchange, sum_in_place
from ktrainer.plan.communication_cost import Link, Network

if TYPE_CHECKING:
    from ktrainer.distributed.mpi_communicator import MpiComm
    from ktrainer.distributed.mpi_world import MpiWorld
    from ktrainer.distributed.world import World

_EXCHANGES = 40
_MESSAGES = 16
_ARRAY_BYTES = 8 * PIECE_BYTES  # more than a cache holds, as gradients are


def measure_network(world: World, between: Link | None) -> Network:
    """The network, between two ranks of a host and two of different hosts; all ranks call it.

    Args:
        between: in place of what would be measured; None: there must be several hosts, or it does
            not matter.
    """
    hosts = world.allgather(host_name(), "host of each rank")
    here = first_on_one_host(hosts)
    others = [rank for rank in range(world.size) if hosts[rank] != hosts[0]]
    near = _pair(world, here) if here else None
    far = _pair(world, [0, others[0]]) if others else None
    none = Link(0.0, 0.0)
    return Network(
        near.link if near else none,
        between or (far.link if far else none),
        near.memory if near else none,
        *((each.post, each.add) if (each := near or far) else (0.0, 0.0)),
    )


def first_on_one_host(hosts: Sequence[str]) -> list[int]:
    """The first two ranks of the first host that has two; empty: none has.

    Args:
        hosts: of each rank.
    """
    shared = next((host for host in hosts if hosts.count(host) > 1), None)
    return [rank for rank, host in enumerate(hosts) if host == shared][:2]


@dataclass(frozen=True)
class _Pair:
    """Two ranks that communicate.

    Attributes:
        link: of their messages.
        memory: that they share; messages where they share none.
        post: seconds to start and complete one more message.
        add: seconds to sum a byte.
    """

    link: Link
    memory: Link
    post: float
    add: float


def _pair(world: World, ranks: Sequence[int]) -> _Pair:
    mine = ranks if world.rank in ranks else [world.rank]
    group = cast("MpiWorld", world).group(mine, "two ranks that measure their link")
    found = _measure_pair(group) if world.rank in ranks else None
    group.close()
    pair: _Pair = world.broadcast(found, ranks[0], "measured link")
    return pair


def _measure_pair(group: MpiComm) -> _Pair:
    comm, other = group.comm, 1 - group.rank
    array = np.ones(_ARRAY_BYTES // 4, np.float32)
    pieces = [array[k : k + PIECE_BYTES // 4] for k in range(0, array.size, PIECE_BYTES // 4)]
    half = PIECE_BYTES // 8  # the segment of each of two ranks

    def small(count: int) -> float:
        messages = [(other, np.zeros(1), np.zeros(1)) for _ in range(count)]
        return _median(lambda: exchange(group, comm, messages, "small messages"))

    one = small(1)
    post = max(0.0, (small(_MESSAGES) - one) / (2 * (_MESSAGES - 1)))
    latency = max(0.0, one - 2 * post)
    places = itertools.cycle(pieces)
    whole = _median(lambda: sum_in_place(group, comm, next(places), "large arrays"))

    def add() -> None:
        piece = next(places)
        add_up(piece[:half], [piece[:half], piece[half:]])

    adding = _median(add) / (4 * half)
    per_byte = (whole - 2 * one - 4 * half * adding) / PIECE_BYTES
    link = Link(latency, max(0.0, per_byte))
    shared = open_shared_memory(group, comm)
    if shared is None:
        return _Pair(link, link, post, adding)
    barrier = _median(group.barrier)
    through = _median(lambda: shared.sum_in_place(next(places), "large arrays"))
    copying = (through - 2 * barrier - 4 * half * adding) / (1.5 * PIECE_BYTES)
    return _Pair(link, Link(barrier, max(0.0, copying)), post, adding)


def _median(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(_EXCHANGES):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[_EXCHANGES // 4 :])
