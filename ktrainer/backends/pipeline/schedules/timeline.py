"""Timeline of a schedule: start and end of each action, for given costs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ktrainer.backends.pipeline.schedules.actions import Action, Result, Schedule, ScheduleError

PerStage: TypeAlias = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations of actions and transfers, in any one unit of time.

    Attributes:
        forward, backward, input_grad, weight_grad: of one microbatch, for each stage.
        activation: from stage s to s + 1, for each s but the last.
        gradient: from stage s + 1 back to s, for each s but the last.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    activation: tuple[float, ...]
    gradient: tuple[float, ...]

    @classmethod
    def of(
        cls,
        stages: int,
        forward: PerStage = 1.0,
        backward: PerStage = 2.0,
        input_grad: PerStage | None = None,
        activation: PerStage = 0.0,
        gradient: PerStage | None = None,
    ) -> Costs:
        """Costs from numbers, the same for all stages, or from sequences, one number a stage.

        Args:
            stages: how many stages there are.
            forward: of a forward pass.
            backward: of a whole backward pass.
            input_grad: the part of it that is the gradient of the stage's input, by default
                half; the weight gradient is the rest.
            activation: of a transfer to the next stage: `stages` - 1 numbers, or one.
            gradient: of a transfer to the stage before; by default as for activations.

        Raises:
            ValueError: a sequence of another length, or a negative cost.
        """
        whole = _each("backward", backward, stages)
        if input_grad is None:
            first: tuple[float, ...] = tuple(value / 2 for value in whole)
        else:
            first = _each("input_grad", input_grad, stages)
        rest = tuple(value - part for value, part in zip(whole, first, strict=True))
        there = _each("activation", activation, stages - 1)
        return cls(
            forward=_each("forward", forward, stages),
            backward=whole,
            input_grad=first,
            weight_grad=_each("backward - input_grad", rest, stages),
            activation=there,
            gradient=there if gradient is None else _each("gradient", gradient, stages - 1),
        )

    def action(self, action: Action) -> float:
        """Duration of `action`."""
        kinds = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }
        return kinds[action.kind][action.stage]

    def transfer(self, result: Result) -> float:
        """Duration of the transfer of `result` to the neighbouring stage."""
        kind, stage, _ = result
        return self.activation[stage] if kind == "F" else self.gradient[stage - 1]


def _each(name: str, value: PerStage, count: int) -> tuple[float, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * count
    if len(values) != count or any(not number >= 0 for number in values):
        raise ValueError(f"{name} needs {count} costs, none below zero, not {value!r}")
    return values


@dataclass(frozen=True, slots=True)
class Span:
    """An action from `start` to `end`, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of all actions of a schedule.

    Attributes:
        schedule: the schedule.
        spans: for each rank its actions with their times, in order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...] = field(repr=False)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, in the unit of the costs."""
        return max((span.end for row in self.spans for span in row), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they do not compute, from 0 to 1."""
        total = self.makespan * self.schedule.ranks
        return 1 - sum(self.busy) / total if total else 0.0


def make_timeline(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate `schedule` in time.

    A rank runs its actions strictly in order; each starts once the rank is free and all that
    the action needs has arrived. Transfers cost no rank's time: they overlap with compute.
    Between stages on one rank nothing is transferred.

    Args:
        schedule: any schedule, also one that was not made by `make_schedule`.
        costs: by default 1 for F, 2 for B, 1 for I and W, 0 for transfers.

    Raises:
        ScheduleError: it deadlocks; the message names each rank that waits, its action, and
            what that waits for.
    """
    costs = costs or Costs.of(schedule.stages)
    ends: dict[Result, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    waiting: defaultdict[Result, list[int]] = defaultdict(list)
    runnable = deque(range(len(schedule.actions)))
    while runnable:
        rank = runnable.popleft()
        row = schedule.actions[rank]
        while len(spans[rank]) < len(row):
            action = row[len(spans[rank])]
            missing = [need for need in action.needs(schedule.stages) if need not in ends]
            if missing:
                waiting[missing[0]].append(rank)
                break
            span = _span(schedule, costs, rank, action, spans[rank], ends)
            spans[rank].append(span)
            if action.result is not None:
                ends[action.result] = span.end
                runnable.extend(waiting.pop(action.result, ()))
    if any(waiting.values()):
        raise ScheduleError(_deadlock(schedule, [len(row) for row in spans], waiting))
    return Timeline(schedule, tuple(tuple(row) for row in spans))


def _span(
    schedule: Schedule,
    costs: Costs,
    rank: int,
    action: Action,
    before: list[Span],
    ends: dict[Result, float],
) -> Span:
    start = before[-1].end if before else 0.0
    for need in action.needs(schedule.stages):
        local = schedule.rank_of(need[1]) == rank
        start = max(start, ends[need] + (0.0 if local else costs.transfer(need)))
    return Span(action, start, start + costs.action(action))


def _deadlock(schedule: Schedule, at: list[int], waiting: dict[Result, list[int]]) -> str:
    """Error message with one line for each rank that is stuck."""
    made = {action.result for row in schedule.actions for action in row}
    lines = []
    for need, ranks in waiting.items():
        kind, stage, microbatch = need
        what = f"the {'activation' if kind == 'F' else 'gradient'} of stage {stage}"
        never = "" if need in made else ", which no rank makes"
        for rank in ranks:
            row = schedule.actions[rank]
            lines.append(
                f"rank {rank} waits in {row[at[rank]]} (its action {at[rank] + 1} of {len(row)}) "
                f"for {what}, microbatch {microbatch}, from rank {schedule.rank_of(stage)}{never}"
            )
    return f"the schedule {schedule.name!r} deadlocks:\n  " + "\n  ".join(sorted(lines))
