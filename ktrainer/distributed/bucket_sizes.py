"""Sizes of the buckets of gradients that suit the links between hosts."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ktrainer.distributed import host_groups
from ktrainer.distributed.link_speed import speeds_between
from ktrainer.distributed.sum_in_place import MOST_RANKS
from ktrainer.distributed.world import World

LARGEST = 25.0  # MiB
_SMALLEST = 1.0  # MiB, and that of the first bucket between hosts
_BUCKET_SECONDS = 1e-3  # of a bucket's host function and messages, whatever its size
_SHARE = 10  # times as long as its fixed costs a bucket's transfer should take


class BucketSizes(NamedTuple):
    """MiB of the first bucket of gradients, and of all others."""

    first: float = LARGEST
    other: float = LARGEST


def choose_bucket_sizes(world: World, hierarchical: bool = True) -> BucketSizes:
    """The sizes that suit the links between the ranks; all ranks call this together, and get the
    same.

    Args:
        hierarchical: as of `depend_on_links`.
    """
    hosts = world.allgather(host_groups.host_name(), "hosts of ranks")
    on_host = Counter(hosts)
    if not depend_on_links(len(on_host), max(on_host.values()), hierarchical):
        return BucketSizes()
    latency, bandwidth = min(speeds_between(world, hosts).values(), key=lambda speed: speed[1])
    return suitable_sizes(latency, bandwidth)


def depend_on_links(hosts: int, fullest: int, hierarchical: bool = True) -> bool:
    """Whether sizes depend on links: of so many hosts, the fullest with so many ranks.

    Only where the order in which ranks are added up does not depend on the length of an array may
    sizes depend on a measurement: MPI adds up more than `MOST_RANKS` hosts, or ranks of a host, as
    it likes.

    Args:
        hierarchical: whether sums are made within hosts first; else there may be at most
            `MOST_RANKS` ranks in all.
    """
    added_up = max(hosts, fullest) if hierarchical else hosts * fullest
    return hosts > 1 and added_up <= MOST_RANKS


def suitable_sizes(latency: float, bandwidth: float) -> BucketSizes:
    """The sizes for ranks on several hosts: fixed costs are at most about a tenth of a transfer.

    Args:
        latency: seconds of a short message, one way, over the slowest link.
        bandwidth: bytes a second of that.
    """
    suitable = _SHARE * (_BUCKET_SECONDS + 2 * latency) * bandwidth / 2**20
    return BucketSizes(_SMALLEST, min(max(suitable, _SMALLEST), LARGEST))
