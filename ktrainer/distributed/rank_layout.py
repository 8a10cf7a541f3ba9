"""The grid of partitions and replicas: which rank holds which partition of which replica.

Pure: numbers in, numbers out. Eight ranks, two partitions, four replicas:

    cluster   replica 0 on ranks 0, 1; replica 1 on 2, 3; ...   a model's partitions are neighbours
    spread    replica 0 on ranks 0, 4; replica 1 on 1, 5; ...   the copies of a partition are

Launchers number the ranks of a node in a row, so `cluster` keeps the activations of a model within
a node, and `spread` the gradients of a partition. The names and their meaning are those of
SageMaker's model-parallel library (`placement_strategy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["cluster", "spread"]


@dataclass(frozen=True)
class Layout:
    """A grid of `partitions` times `replicas` ranks.

    Attributes:
        partitions: parts that a model is cut into.
        replicas: copies of the whole model.
        placement: whether the ranks of a replica (`cluster`) or those of a partition (`spread`)
            are numbered in a row.
    """

    partitions: int = 1
    replicas: int = 1
    placement: Strategy = "cluster"

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.replicas < 1:
            raise ValueError(
                f"a layout needs at least one partition and one replica, not {self.partitions} "
                f"and {self.replicas}"
            )
        if self.placement not in ("cluster", "spread"):
            raise ValueError(f"a placement is 'cluster' or 'spread', not {self.placement!r}")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.partitions * self.replicas

    def rank_of(self, partition: int, replica: int) -> int:
        """The rank that has `partition` of `replica`, both counted from 0.

        Raises:
            IndexError: there is no such partition or replica.
        """
        _check("partition", partition, self.partitions)
        _check("replica", replica, self.replicas)
        if self.placement == "cluster":
            return replica * self.partitions + partition
        return partition * self.replicas + replica

    def partition_of(self, rank: int) -> int:
        """The partition of `rank`. Raises IndexError if there is no such rank."""
        _check("rank", rank, self.size)
        return rank % self.partitions if self.placement == "cluster" else rank // self.replicas

    def replica_of(self, rank: int) -> int:
        """The replica of `rank`. Raises IndexError if there is no such rank."""
        _check("rank", rank, self.size)
        return rank // self.partitions if self.placement == "cluster" else rank % self.replicas

    def model_ranks(self, replica: int) -> list[int]:
        """The ranks that hold `replica` together, in the order of partitions."""
        return [self.rank_of(partition, replica) for partition in range(self.partitions)]

    def copy_ranks(self, partition: int) -> list[int]:
        """The ranks that hold copies of `partition`, in the order of replicas."""
        return [self.rank_of(partition, replica) for replica in range(self.replicas)]


def _check(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise IndexError(f"there is no {what} {number}; there are {count}, counted from 0")
