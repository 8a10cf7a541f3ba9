"""Actions, and schedules: for each rank the actions that it runs, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeAlias

from ktrainer.errors import KtrainerError

Kind = Literal["F", "B", "I", "W"]

# The result of an action: ("F", stage, microbatch) is the activation that the stage sends,
# ("B", stage, microbatch) the gradient of its input, computed by a B or an I.
Result: TypeAlias = tuple[Literal["F", "B"], int, int]


class ScheduleError(KtrainerError):
    """A schedule that is incomplete, out of order, or that deadlocks."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One piece of work of one stage on one microbatch.

    Attributes:
        kind: `F` forward; `B` backward; or the two halves of `B`: `I`, the gradient of the
            stage's input, which the stage before waits for, and `W`, the gradient of its
            weights, on which no action depends (Qi et al. 2023).
        stage: 0 to ranks x chunks - 1, counted along the model.
        microbatch: 0 to microbatches - 1.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def result(self) -> Result | None:
        """The result that other actions may need; None for `W`."""
        if self.kind == "W":
            return None
        return ("F" if self.kind == "F" else "B", self.stage, self.microbatch)

    def needs(self, stages: int) -> tuple[Result, ...]:
        """The results that it depends on, in a model of `stages` stages."""
        stage, microbatch = self.stage, self.microbatch
        if self.kind == "F":
            return (("F", stage - 1, microbatch),) if stage else ()
        if self.kind == "W":
            return (("B", stage, microbatch),)
        own: Result = ("F", stage, microbatch)
        return (own,) if stage == stages - 1 else (own, ("B", stage + 1, microbatch))


Rows: TypeAlias = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: the actions of each rank, in order, for one batch.

    Stage s is on rank s modulo `ranks`, so that with several chunks a microbatch goes round
    the ranks as often (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM").

    Attributes:
        name: that of the function that made it.
        ranks: processes in the pipeline.
        microbatches: parts that a batch is cut into.
        chunks: stages on each rank.
        actions: for each rank its actions in order.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    actions: Rows = field(repr=False)

    @property
    def stages(self) -> int:
        """Stages of the model: ranks x chunks."""
        return self.ranks * self.chunks

    @property
    def trains(self) -> bool:
        """True if there are backward passes."""
        return any(action.kind != "F" for row in self.actions for action in row)

    def rank_of(self, stage: int) -> int:
        """The rank that `stage` is on."""
        return stage % self.ranks

    def label(self, action: Action) -> str:
        """`2F0`, or `F0` where a rank has but one stage."""
        return str(action) if self.chunks > 1 else f"{action.kind}{action.microbatch}"


def live_activations(schedule: Schedule) -> tuple[int, ...]:
    """The most activations that each rank keeps at one time, in (stage, microbatch) pairs.

    One is kept from its forward pass until its backward pass, or its weight gradient, is done.
    Without backward passes none is kept.
    """
    if not schedule.trains:
        return (0,) * schedule.ranks
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    return tuple(
        max(accumulate((change[action.kind] for action in row), initial=0))
        for row in schedule.actions
    )


def microbatches_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches that each rank has in flight: what `active_microbatches` caps.

    One is in flight from its first forward pass on the rank until its last backward pass
    there, weight gradients included. Without backward passes none is.
    """
    if not schedule.trains:
        return (0,) * schedule.ranks
    return tuple(_most_in_flight(row) for row in schedule.actions)


def _most_in_flight(row: tuple[Action, ...]) -> int:
    last = {action.microbatch: at for at, action in enumerate(row)}
    flying: set[int] = set()
    most = 0
    for at, action in enumerate(row):
        flying.add(action.microbatch)
        most = max(most, len(flying))
        if last[action.microbatch] == at:
            flying.remove(action.microbatch)
    return most
