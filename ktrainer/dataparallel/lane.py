"""A channel with sums of floats on it."""

from __future__ import annotations

from ktrainer.dataparallel.channel import Channel
from ktrainer.dataparallel.sums import ChannelSums
from ktrainer.distributed.mpi_communicator import MpiGroup

GRADIENTS, OTHERS = "dataparallel_gradients", "dataparallel_others"


class Lane(Channel):
    """A channel, and sums of floats on it."""

    def __init__(self, world: MpiGroup, lane: str) -> None:
        super().__init__(world, lane)
        self.sums = ChannelSums(self)

    def close(self) -> None:
        self.sums.close()
        super().close()
