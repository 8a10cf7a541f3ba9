"""Replacements of lost ranks: when to start one, and when to admit it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ktrainer.config.launch_environment import MAY_JOIN
from ktrainer.distributed.elastic_world import ElasticWorld
from ktrainer.distributed.joining_ranks import SpawnedRank, admit, free_local_rank

if TYPE_CHECKING:
    from ktrainer.config import WorldConfig

_FAILURES = 3  # joining ranks in a row that failed before they joined; then no more are started


class JoiningPolicy:
    """Keep the world at its wanted size: `max_size`, else with `replace` the size at the start.
    Rank 0 starts the joining ranks, one after the other.

    Args:
        world: the ranks.
        config: the `world` section.

    Attributes:
        started: ranks at the start.
        next_rank: the number of the next joining rank. All ranks keep the highest of any, as any of
            them may become rank 0: the launcher has pipes for one process of a number.
    """

    def __init__(self, world: ElasticWorld, config: WorldConfig) -> None:
        self.world = world
        self._wanted = config.max_size or 0
        self._replace = config.replace
        # A joining rank begins at the beginning of the script.
        self._first, world.trained = not world.trained, True
        self.started = world.nominal_size
        self._recruit: SpawnedRank | None = None
        self.next_rank = world.size
        self._root = world.members[0].stable_rank
        self._failures = 0
        self._unconfirmed: int | None = None  # stable rank of the newest, until it trains

    def look(self) -> bool:
        """Between two updates: start a rank if one is wanted; return whether one is ready."""
        self.next_rank = max(self.next_rank, *(p.stable_rank + 1 for p in self.world.members))
        if not self.world.is_root:
            return False
        if any(member.stable_rank == self._unconfirmed for member in self.world.members):
            self._failures, self._unconfirmed = 0, None
        if self._recruit is not None and self._recruit.failed:
            self._recruit, self._failures = None, self._failures + 1
        if self._failures == _FAILURES:
            self._failures += 1  # beyond the limit: said once
            _say(f"{_FAILURES} processes that were to join have failed: no more are started")
        if self._recruit is None and self._is_wanted():
            if self.next_rank >= self.started + MAY_JOIN:
                self._failures = _FAILURES + 1
                _say(f"{MAY_JOIN} processes have joined: no more are started")
                return False
            local_rank, size = free_local_rank(self.world), self.world.size + 1
            sizes = self.world.bucket_sizes
            self._unconfirmed = self.next_rank
            self._recruit = SpawnedRank(self.next_rank, local_rank, size, bucket_sizes=sizes)
            self.next_rank += 1
        return self._recruit is not None and self._recruit.ready()

    def admit(self) -> None:
        """Admit the joining rank that is ready; all ranks call this together.

        Raises:
            PeerLost: on all ranks, if it, or one of them, was lost on the way.
        """
        recruit, self._recruit = self._recruit, None
        self._failures += recruit is not None  # until `look` finds it among the members
        admit(self.world, recruit)

    def learn(self, started: int) -> None:
        """Record with how many ranks training began. All ranks call it after each change."""
        self.started = self.world.nominal_size = started
        if self._root != (root := self.world.members[0].stable_rank):
            self._root = root
            self.next_rank += 1  # the rank 0 before may have given that number, unheard

    def enter(self) -> bool:
        """As a joining rank: wait to be admitted; return whether it was."""
        handshake, self.world.join_handshake = self.world.join_handshake, None
        return handshake is not None and handshake.wait(self.world)

    def close(self) -> None:
        """Start no more joining ranks, and dismiss the one that is being prepared."""
        self._wanted, self._replace = 0, False
        if self._recruit is not None:
            self._recruit.dismiss()

    def _is_wanted(self) -> bool:
        size = max(self._wanted, self.started if self._replace else 0)
        return self._first and self.world.size < size and self._failures < _FAILURES


def _say(text: str) -> None:
    print(f"ktrainer: {text}", file=sys.stderr, flush=True)
