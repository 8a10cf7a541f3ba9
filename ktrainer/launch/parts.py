"""Which deaths the others go on after, and which must end all: launches that heal."""

from __future__ import annotations

from collections.abc import Iterable

from ktrainer.launch.channel import Note


class Parts:
    """Where each process is in its script, as far as healing goes.

    mpirun does not end the others when it is told to let them mitigate failures; they do so from
    the first step to the end of `fit` alone.

    Args:
        first: how many processes were started; those that come later have higher numbers.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._of: dict[int, int] = {}

    def hear(self, note: Note) -> None:
        """A process says which part it, and maybe others with it, has come to."""
        for slot in note.slots:
            self._of[slot] = max(note.number, self._of.get(slot, 0))

    def may_go(self, rank: int) -> bool:
        """Whether the others go on without this one; nobody waits for one that was yet to join."""
        part = self._of.get(rank, 0)
        return part % 2 == 1 or (part == 0 and rank >= self._first)

    def missed(self, gone: Iterable[int]) -> int | None:
        """The first of those that ended without a word whom the others cannot go on without."""
        return next((rank for rank in gone if not self.may_go(rank)), None)
