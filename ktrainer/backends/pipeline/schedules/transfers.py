"""Transfers between stages, and why their messages need tags.

A rank receives what an action needs before it, in the order given here, and sends what it made
after it. With sends that are buffered or not waited for at once, and receives that block, no
schedule of `make_schedule` deadlocks. Sends that block until they are received (MPI's
synchronous mode, or large messages in `MPI_Send`) do deadlock, in 1F1B for one, where two
neighbours send to each other at the same time.

Messages need no tags where, from each rank to each other, they are received in the order in which
they are sent. Between neighbouring stages that holds for all schedules but one: interleaved, with
several chunks and a cap that bites, where chunks overtake each other (3 chunks on 2 ranks with
3 microbatches in flight, for one). A schedule made by hand need not keep to it either. So tag
messages by (kind, stage, microbatch), as `Transfer` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ktrainer.backends.pipeline.schedules.actions import Action, Schedule


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One message: it is its own tag, since no two in a schedule are equal.

    Attributes:
        kind: `activation`, made by an F, or `gradient`, made by a B or an I.
        source: the stage that sends.
        destination: the stage that receives.
        microbatch: which one.
    """

    kind: Literal["activation", "gradient"]
    source: int
    destination: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.source}->{self.destination} of microbatch {self.microbatch}"


class Transfers:
    """Transfers that each action of a schedule receives and sends.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def receives(self, action: Action) -> tuple[Transfer, ...]:
        """Transfers that `action` needs, including those from a stage on the same rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F" and stage > 0:
            return (Transfer("activation", stage - 1, stage, microbatch),)
        if action.kind in "BI" and stage + 1 < self.schedule.stages:
            return (Transfer("gradient", stage + 1, stage, microbatch),)
        return ()

    def sends(self, action: Action) -> tuple[Transfer, ...]:
        """Transfers that `action` makes, including those to a stage on the same rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F" and stage + 1 < self.schedule.stages:
            return (Transfer("activation", stage, stage + 1, microbatch),)
        if action.kind in "BI" and stage > 0:
            return (Transfer("gradient", stage, stage - 1, microbatch),)
        return ()

    def ranks(self, transfer: Transfer) -> tuple[int, int]:
        """The ranks that send and receive; equal for a transfer within one process."""
        schedule = self.schedule
        return schedule.rank_of(transfer.source), schedule.rank_of(transfer.destination)
