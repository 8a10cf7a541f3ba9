"""A world of some of the ranks of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ktrainer.world.mpi_comm import MpiComm


class MpiGroup(MpiComm):
    """Ranks of a world that have a communicator of their own; `MpiWorld.group` makes it.

    `rank` and `size`, roots and the order of gathered values are those within the group. Waits are
    the world's: they have its deadline and step, and their errors name its ranks.
    """

    def __init__(
        self, world: MpiComm, comm: MPI.Intracomm, ranks: Sequence[int], label: str
    ) -> None:
        super().__init__(comm)
        self._ranks = tuple(ranks)
        self._world = world
        plural = "s" if self.size > 1 else ""
        self._among = f"{label} (rank{plural} {', '.join(map(str, ranks))})"

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    # The world's at the moment of use: its loop counts steps, its user may change the deadline.
    @property
    def step(self) -> int:  # type: ignore[override]
        """The global step of the world."""
        return self._world.step

    @property
    def deadline(self) -> float:  # type: ignore[override]
        """Seconds that any wait may last, in the world."""
        return self._world.deadline

    def duplicate(self) -> MPI.Intracomm:
        copy = super().duplicate()
        self._world.watch(copy)
        return copy

    def wait(self, request: Any, what: str) -> None:
        self._world.wait(request, f"{what} among {self._among}")
