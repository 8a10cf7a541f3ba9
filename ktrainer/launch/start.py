"""Whether all ranks come to open the world: MPI's own start waits for ever, and deaf to signals."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ktrainer.errors import name_ranks

ASK = signal.SIGUSR2  # a rank's fault handler then writes its stack
NOTICE_SECONDS = 60.0  # then a person is told what is waited for
_ANSWER_SECONDS = 0.5


@dataclass
class Start:
    """The wait of the ranks that have come to open the world for those that have not.

    Args:
        ranks: how many are to come.
    """

    ranks: int
    _came: set[int] = field(default_factory=set)
    _first: int = 0
    _since: float = 0.0
    _seconds: float = 0.0
    _told: bool = False

    def hear(self, rank: int, seconds: float) -> None:
        """A rank has come, and waits so long; those that join later are not waited for."""
        if rank >= self.ranks:
            return
        if not self._came:
            self._first, self._since = rank, time.monotonic()
        self._came.add(rank)
        self._seconds = max(seconds, self._seconds)

    @property
    def missing(self) -> list[int]:
        """Who is waited for; nobody while none has come."""
        return [rank for rank in range(self.ranks) if rank not in self._came] if self._came else []

    def notice(self) -> str | None:
        """What to tell a person, once, where it takes long."""
        if self._told or not self.missing or self._waited < NOTICE_SECONDS:
            return None
        self._told = True
        return (
            f"rank {self._first} has waited {NOTICE_SECONDS:g} s for {name_ranks(self.missing)} to "
            f"come to `Trainer(...)`; after {self._seconds:g} s (world.start_deadline) all are "
            "ended"
        )

    def late(self, ended: Collection[int]) -> str | None:
        """Why all are to be ended, once those that came have waited too long.

        Args:
            ended: ranks that came to the end of the script.
        """
        if not self.missing or self._waited < self._seconds:
            return None
        never = [rank for rank in self.missing if rank in ended]
        more = f"; {name_ranks(never)} came to the end of the script without it" if never else ""
        return (
            f"rank {self._first} waited {self._seconds:g} s for {name_ranks(self.missing)} to come "
            f"to `Trainer(...)`, or to where the world is opened otherwise{more}. If it may take "
            "that long, raise world.start_deadline"
        )

    def ask(self, processes: Mapping[int, int]) -> None:
        """Have those that are missing write where they are.

        Args:
            processes: rank -> process id.
        """
        for rank in self.missing:
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(processes[rank], ASK)
        time.sleep(_ANSWER_SECONDS)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._since
