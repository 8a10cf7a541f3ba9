"""A channel with sums of floats on it."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from ktrainer.dataparallel.channel import Channel
from ktrainer.dataparallel.sums import ChannelSums
from ktrainer.distributed.mpi_communicator import MpiGroup

GRADIENTS, OTHERS = "dataparallel_gradients", "dataparallel_others"


class Lane(Channel):
    """A channel, and sums of floats on it."""

    world: MpiGroup

    def __init__(self, world: MpiGroup, lane: str) -> None:
        super().__init__(world, lane)
        self.sums = ChannelSums(self)

    def switch(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> None:
        """Use another communicator: ranks were lost, or have joined. All of them call it."""
        self.error = None
        self.world.switch(comm, ranks)
        self.sums.open()

    def close(self) -> None:
        self.sums.close()
        super().close()
