"""Process sets: groups of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from ktrainer.dataparallel.rank_group import RankGroup
from ktrainer.errors import WorldError


class ProcessSet:
    """Some of the ranks; may overlap with other process sets.

    Args:
        ranks: their ranks among all processes; None: all of them.

    Attributes:
        ranks: the same, in ascending order.
        process_set_id: 0 for all ranks, else its number in the order in which sets were added;
            None before that.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self.ranks = None if ranks is None else sorted(int(rank) for rank in ranks)
        self.process_set_id: int | None = 0 if ranks is None else None
        self.group: RankGroup | None = None

    def included(self) -> bool:
        """Return whether this process is one of its ranks."""
        return self.opened().included

    def rank(self) -> int:
        """This process's number in the set; raises WorldError if it is not one of its ranks."""
        return self.members().rank

    def size(self) -> int:
        """The number of its ranks."""
        return len(self.opened().ranks)

    def opened(self) -> RankGroup:
        """Its communicators.

        Raises:
            WorldError: it was not added, or was removed.
        """
        if self.group is None:
            how = "call init()" if self.ranks is None else "pass it to init or add_process_set"
            raise WorldError(f"{self} is not open: {how} first, on every rank.")
        return self.group

    def members(self) -> RankGroup:
        """Its communicators, for a call that its ranks make together.

        Raises:
            WorldError: this process is not one of them.
        """
        group = self.opened()
        if not group.included:
            raise WorldError(
                f"rank {group.world.rank} is not in {self}, so it cannot take part in its calls. "
                "Call it on the ranks of the set only: test `included()` first."
            )
        return group

    def __repr__(self) -> str:
        return f"ProcessSet({'all ranks' if self.ranks is None else self.ranks})"


global_process_set = ProcessSet()
