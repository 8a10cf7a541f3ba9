"""What crosses between stages, and whether ranks may match messages by their order alone.

A rank receives what an action needs before it, in the order given here, and sends what it made
after it. With sends that are buffered or not waited for at once, and receives that block, no
schedule of `make_schedule` deadlocks. Sends that block until they are received (MPI's
synchronous mode, or large messages in `MPI_Send`) do deadlock, in 1F1B for one, where two
neighbours send to each other at the same time.

Messages need no tags where, from each rank to each other, they are received in the order in which
they are sent. Between neighbouring stages that holds for all schedules but one: interleaved, with
several chunks and a cap that bites, where chunks overtake each other (3 chunks on 2 ranks with
3 microbatches in flight, for one). A schedule made by hand need not keep to it either. So tag
messages by (kind, stage, microbatch), as `Transfer` does; `unordered` says which ranks need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ktrainer.backends.pipeline.actions import Action, Schedule


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
    """What each action of a schedule receives and sends.

    Args:
        schedule: the schedule.
        edges: (from, to) for each pair of stages between which activations go, from < to. By
            default each stage feeds the next; a skip connection adds an edge over more stages.

    Raises:
        ValueError: an edge that does not go forward between two stages of the schedule.
    """

    def __init__(self, schedule: Schedule, edges: Sequence[tuple[int, int]] | None = None) -> None:
        self.schedule = schedule
        if edges is None:
            edges = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
        self._into: defaultdict[int, list[int]] = defaultdict(list)
        self._out_of: defaultdict[int, list[int]] = defaultdict(list)
        for source, destination in sorted(set(edges)):
            if not 0 <= source < destination < schedule.stages:
                raise ValueError(
                    f"({source}, {destination}) is no edge between {schedule.stages} stages: an "
                    "edge goes from an earlier stage to a later one"
                )
            self._into[destination].append(source)
            self._out_of[source].append(destination)

    def receives(self, action: Action) -> tuple[Transfer, ...]:
        """What must have arrived before `action`, including from stages on the same rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            before = self._into[stage]
            return tuple(Transfer("activation", at, stage, microbatch) for at in before)
        if action.kind == "W":
            return ()
        return tuple(Transfer("gradient", at, stage, microbatch) for at in self._out_of[stage])

    def sends(self, action: Action) -> tuple[Transfer, ...]:
        """What `action` makes for other stages, including those on the same rank."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            after = self._out_of[stage]
            return tuple(Transfer("activation", stage, at, microbatch) for at in after)
        if action.kind == "W":
            return ()
        return tuple(Transfer("gradient", stage, at, microbatch) for at in self._into[stage])

    def ranks(self, transfer: Transfer) -> tuple[int, int]:
        """The ranks that send and receive; equal where nothing leaves the process."""
        schedule = self.schedule
        return schedule.rank_of(transfer.source), schedule.rank_of(transfer.destination)

    def unordered(self) -> tuple[tuple[int, int], ...]:
        """The (sending, receiving) ranks whose messages are not received as they are sent."""
        sent: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        received: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)
        for row in self.schedule.actions:
            for action in row:
                for transfer in self.receives(action):
                    received[self.ranks(transfer)].append(transfer)
                for transfer in self.sends(action):
                    sent[self.ranks(transfer)].append(transfer)
        pairs = sorted(sent.keys() | received.keys())
        return tuple(pair for pair in pairs if pair[0] != pair[1] and sent[pair] != received[pair])
