"""List scheduling: each rank runs the ready action of highest priority, within a cap."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ktrainer.backends.pipeline.schedules.actions import Action, Rows

Priority: TypeAlias = Callable[[Action], Any]

_TICKS = {"F": 1, "B": 2}


@dataclass
class _Rank:
    """State of one rank: the actions that it has run and those that are ready.

    Attributes:
        done: its actions so far, in order.
        ready: a heap of (priority, action) that could start now.
        new: first forward passes of microbatches that are not in flight here yet, in order.
        flying: microbatches in flight.
        busy: whether it is running an action.
    """

    done: list[Action] = field(default_factory=list)
    ready: list[tuple[Any, Action]] = field(default_factory=list)
    new: deque[Action] = field(default_factory=deque)
    flying: int = 0
    busy: bool = False

    def start(self, priority: Priority, limit: int) -> Action | None:
        """The action to run now, or None."""
        if self.busy:
            return None
        admit = bool(self.new) and self.flying < limit
        if admit and (not self.ready or priority(self.new[0]) < self.ready[0][0]):
            self.flying += 1
            action = self.new.popleft()
        elif self.ready:
            action = heapq.heappop(self.ready)[1]
        else:
            return None
        self.busy = True
        self.done.append(action)
        return action


def list_schedule(
    ranks: int, microbatches: int, chunks: int, limit: int, priority: Priority
) -> Rows:
    """Schedule each rank to run the ready action with the lowest priority value.

    A forward pass is taken as one tick, a backward pass as two, a transfer as none. It always
    ends, for any `limit` from 1: every rank admits microbatches in order, so the oldest that is
    not finished is never kept out by the cap.

    Args:
        ranks, microbatches, chunks: the shape of the pipeline.
        limit: the most microbatches in flight on a rank; those in flight always proceed.
        priority: what decides between actions that are ready; less is sooner.
    """
    stages = ranks * chunks
    state = [_Rank() for _ in range(ranks)]
    running: list[tuple[int, Action]] = []
    state[0].new.extend(Action("F", 0, microbatch) for microbatch in range(microbatches))
    now = 0
    while True:
        for rank in state:
            if action := rank.start(priority, limit):
                heapq.heappush(running, (now + _TICKS[action.kind], action))
        if not running:
            return tuple(tuple(rank.done) for rank in state)
        now = running[0][0]
        # All that ends now, before anything starts: else a rank could miss what is ready.
        while running and running[0][0] == now:
            _finish(heapq.heappop(running)[1], state, stages, priority)


def _finish(action: Action, state: list[_Rank], stages: int, priority: Priority) -> None:
    """Free the rank that ran `action`, and make what waited for it ready."""
    ranks = len(state)
    rank = state[action.stage % ranks]
    rank.busy = False
    if action.kind == "B" and action.stage < ranks:
        rank.flying -= 1
    following = _following(action, stages)
    if following is None:
        return
    target = state[following.stage % ranks]
    if following.kind == "F" and following.stage < ranks:
        target.new.append(following)
    else:
        heapq.heappush(target.ready, (priority(following), following))


def _following(action: Action, stages: int) -> Action | None:
    """The one action that waits for `action`; the forward pass of a B is done long before."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F" and stage < stages - 1:
        return Action("F", stage + 1, microbatch)
    if action.kind == "F":
        return Action("B", stage, microbatch)
    return Action("B", stage - 1, microbatch) if stage else None
