"""Newcomers: when one is wanted, and when it may come in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ktrainer.config.launched import SPARE
from ktrainer.world.healing import HealingWorld
from ktrainer.world.newcomers import Recruit, admit, free_local_rank

if TYPE_CHECKING:
    from ktrainer.config import WorldConfig

_FAILURES = 3  # newcomers in a row that died before they came in; then no more are started


class Recruiting:
    """Keeps the world at the size that was asked for: `max_size`, else with `replace` the size at
    the start. Rank 0 starts the newcomers, one after the other.

    Args:
        world: the ranks.
        config: the `world` section.

    Attributes:
        started: ranks at the start.
    """

    def __init__(self, world: HealingWorld, config: WorldConfig) -> None:
        self.world = world
        self._wanted = config.max_size or 0
        self._replace = config.replace
        # A newcomer begins at the beginning of the script.
        self._first, world.trained = not world.trained, True
        self.started = world.nominal_size
        self._recruit: Recruit | None = None
        self._next_slot = world.size
        self._failures = 0

    def look(self) -> bool:
        """Between two updates: start a newcomer if one is wanted; whether one is ready."""
        self._next_slot = max(self._next_slot, *(p.slot + 1 for p in self.world.peers))
        if not self.world.is_root:
            return False
        if self._recruit is not None and self._recruit.failed:
            self._recruit, self._failures = None, self._failures + 1
            if self._failures == _FAILURES:
                _say(f"{_FAILURES} processes that were to join have failed: no more are started")
        if self._recruit is None and self._is_wanted():
            if self._next_slot == self.started + SPARE:
                self._failures = _FAILURES
                _say(f"{SPARE} processes have joined: no more are started")
                return False
            self._recruit = Recruit(self._next_slot, free_local_rank(self.world))
            self._next_slot += 1
        return self._recruit is not None and self._recruit.ready()

    def admit(self) -> None:
        """Let the newcomer in that is ready; all ranks call it.

        Raises:
            PeerLost: on all ranks, if it, or one of them, died on the way.
        """
        recruit, self._recruit = self._recruit, None
        self._failures += 1
        admit(self.world, recruit)
        self._failures = 0

    def learn(self, started: int) -> None:
        """What newcomers must know: with how many ranks training began."""
        self.started = self.world.nominal_size = started

    def enter(self) -> bool:
        """As a newcomer: wait to be let in."""
        entrance, self.world.entrance = self.world.entrance, None
        return entrance is not None and entrance.wait(self.world)

    def close(self) -> None:
        """Want nobody any more."""
        self._wanted, self._replace = 0, False
        if self._recruit is not None:
            self._recruit.dismiss()

    def _is_wanted(self) -> bool:
        size = max(self._wanted, self.started if self._replace else 0)
        return self._first and self.world.size < size and self._failures < _FAILURES


def _say(text: str) -> None:
    print(f"ktrainer: {text}", file=sys.stderr, flush=True)
