"""The communicators of a process set: one channel for gradients, one for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from ktrainer.distributed import World
from ktrainer.errors import WorldError

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel
    from ktrainer.distributed.mpi_world import MpiWorld


class RankGroup:
    """Ranks that communicate among themselves. All ranks of the world make it together.

    Args:
        world: all ranks.
        ranks: those of the group; None: all.

    Attributes:
        included: whether this process is one of them.
        rank: its number among them; -1 if it is not.
        host: their world for host messages of callbacks.
        gradients, others: channels; None where nothing has to be sent.
    """

    def __init__(self, world: World, ranks: Sequence[int] | None = None) -> None:
        self.world = world
        self.ranks = list(range(world.size) if ranks is None else ranks)
        self.included = world.rank in self.ranks
        self.rank = self.ranks.index(world.rank) if self.included else -1
        self.size = len(self.ranks)
        self.host: World = world
        self._gradients: Channel | None = None
        self._others: Channel | None = None
        if world.size > 1 or world.heals:
            self._open(cast("MpiWorld", world), ranks)

    def _open(self, world: MpiWorld, ranks: Sequence[int] | None) -> None:
        # Importing MPI starts it.
        from ktrainer.dataparallel.channel import GRADIENTS, OTHERS, Channel
        from ktrainer.distributed.mpi_communicator import MpiGroup

        if ranks is None:
            name, every = "all ranks", world.ranks
            first = MpiGroup(world, world.duplicate(), every, name)
        else:
            rest = [rank for rank in range(world.size) if rank not in self.ranks]
            name = "the process set"
            first = world.group(self.ranks if self.included else rest, name)
            self.host = MpiGroup(world, first.duplicate(), first.ranks, name)
        second = MpiGroup(world, first.duplicate(), first.ranks, name)
        self._gradients, self._others = Channel(first, GRADIENTS), Channel(second, OTHERS)

    @property
    def single(self) -> bool:
        """Whether there is no other rank to communicate with, now and later."""
        return self.size == 1 and not self.world.heals

    def ranks_changed(self) -> None:
        """Reopen the channels of all ranks, some of which were lost, or have joined.

        Compiled functions have the channels, so these stay the same objects.
        """
        world = cast("MpiWorld", self.world)
        self.ranks, self.rank, self.size = list(world.ranks), world.rank, world.size
        for channel in (self.gradients, self.others):
            channel.switch(world.duplicate(), world.ranks)

    @property
    def gradients(self) -> Channel:
        """The channel of gradients; only where `single` is false."""
        assert self._gradients is not None
        return self._gradients

    @property
    def others(self) -> Channel:
        """The channel of everything else; only where `single` is false."""
        assert self._others is not None
        return self._others

    def position_of(self, root_rank: int) -> int:
        """The number in the group of a rank of the world.

        Raises:
            WorldError: it is not in the group.
        """
        if root_rank not in self.ranks:
            raise WorldError(
                f"root_rank={root_rank} is none of the ranks {self.ranks} that take part; give one "
                "of them."
            )
        return self.ranks.index(root_rank)

    def close(self) -> None:
        """Free the communicators; all ranks of the world call it together."""
        channels: list[Any] = [
            channel for channel in (self._gradients, self._others) if channel is not None
        ]
        self._gradients = self._others = None
        if self.host is not self.world:
            channels.append(self.host)
        for channel in channels:
            channel.close()
