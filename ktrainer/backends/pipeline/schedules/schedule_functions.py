"""The schedules: one function each, from the pipeline's shape to the actions of every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ktrainer.backends.pipeline.schedules.actions import (
    Action,
    Kind,
    Rows,
    Schedule,
    microbatches_in_flight,
)
from ktrainer.backends.pipeline.schedules.list_scheduling import list_schedule
from ktrainer.backends.pipeline.schedules.timeline import make_timeline
from ktrainer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a pipeline: the arguments of all schedule functions.

    Attributes:
        ranks: processes in the pipeline.
        microbatches: parts of a batch.
        chunks: stages on each rank.
        active: the most microbatches in flight on a rank; None: the schedule's own number.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    active: int | None = None


def forward_only(shape: Shape) -> Rows:
    """All forward passes, for evaluation: nothing is kept, so nothing is capped.

    With one chunk it takes M + P - 1 forward passes.
    """
    return _rows(shape, lambda rank: _own(shape, rank, "F"))


def gpipe(shape: Shape) -> Rows:
    """All forward passes, then all backward passes; keeps all M microbatches on every rank.

    Backward passes are in the order of the forward passes, not in reverse as in the paper: it
    takes as long, and gradients then add up in the same order as under every other schedule.
    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks".

    Raises:
        ConfigError: fewer microbatches may be in flight than there are.
    """
    if shape.active is not None and shape.active < shape.microbatches:
        raise ConfigError(
            f"gpipe runs every forward pass before the first backward pass, so all "
            f"{shape.microbatches} microbatches of an update are in flight, more than "
            f"{shape.active}: use {shape.microbatches} or more, or backend.schedule=1f1b, which is "
            f"as fast with {min(shape.ranks, shape.microbatches)}.",
            path="backend.active_microbatches",
            value=shape.active,
        )
    return _rows(shape, lambda rank: _own(shape, rank, "F") + _own(shape, rank, "B"))


def one_forward_one_backward(shape: Shape) -> Rows:
    """1F1B: as long as gpipe, but stage s keeps at most P - s activations.

    Rank s runs P - s - 1 forward passes, then one forward and one backward pass in turn. Fewer
    in flight than P make it slower; one is a model in parts with no overlap at all.
    Narayanan et al. 2019, "PipeDream"; with a flush after each batch, 2021, "PipeDream-2BW".

    Raises:
        ConfigError: several chunks.
    """
    _one_chunk(shape, "1f1b")
    active = _active(shape)

    def row(rank: int) -> list[Action]:
        warmup = min(shape.ranks - rank, active) - 1
        return _in_turn(_own(shape, rank, "F"), _own(shape, rank, "B"), warmup)

    return _rows(shape, row)


def zero_bubble(shape: Shape) -> Rows:
    """1F1B whose weight gradients fill the bubble; every rank keeps at most P activations.

    ZB-H1 of Qi et al. 2023, "Zero Bubble Pipeline Parallelism", figure 3: rank s is s
    microbatches late with its weight gradients, so that each rank keeps the P that under 1F1B
    the first one keeps. With F = I = W and M >= P the bubble's time is a third of 1F1B's.

    Raises:
        ConfigError: several chunks.
    """
    _one_chunk(shape, "zero_bubble")
    active = _active(shape)

    def row(rank: int) -> list[Action]:
        warmup = min(shape.ranks - rank, active) - 1
        late = active - 1 - warmup
        order = _in_turn(_own(shape, rank, "F"), _own(shape, rank, "I"), warmup)
        return _weights_after(order, late)

    return _rows(shape, row)


def interleaved(shape: Shape) -> Rows:
    """Several chunks on a rank: the bubble shrinks by their number, for more messages.

    Rank r runs 2(P - r - 1) + (v - 1)P forward passes, then one forward and one backward pass
    in turn, P microbatches a chunk at a time (Narayanan et al. 2021, "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", figure 4; there M must be a
    multiple of P). Here the schedule is made for the next multiple of P, and the actions of
    microbatches that do not exist are dropped: no other action depends on them, since
    dependencies are within one microbatch. Cutting the last group short instead, as is often
    done, deadlocks for (4 ranks, 5 microbatches, 3 chunks).

    Where that has more than `active` microbatches in flight, each rank runs the first action in
    this order that is ready and within the cap. As such lists go, a lower cap is now and then
    faster; then the schedule keeps to the lower one.

    With one chunk it is what SageMaker calls interleaved: a backward pass as soon as there is
    one, else the next forward pass, with at most `active` microbatches in flight, by default
    its P + 2. That is as fast as 1F1B, and with more in flight transfers have longer to arrive.
    """
    if shape.chunks == 1:
        limit = shape.active or shape.ranks + 2
        return list_schedule(shape.ranks, shape.microbatches, 1, limit, _backward_first)
    rows = _megatron(shape)
    limit = shape.active or shape.microbatches
    made = Schedule("interleaved", shape.ranks, shape.microbatches, shape.chunks, rows)
    if max(microbatches_in_flight(made)) <= limit:
        return rows
    place = {action: at for row in rows for at, action in enumerate(row)}
    capped = [
        list_schedule(shape.ranks, shape.microbatches, shape.chunks, active, place.__getitem__)
        for active in range(1, limit + 1)
    ]
    return min(capped, key=lambda rows: make_timeline(replace(made, actions=rows)).makespan)


def _megatron(shape: Shape) -> Rows:
    ranks, chunks = shape.ranks, shape.chunks

    def row(rank: int) -> list[Action]:
        warmup = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
        order = _in_turn(_padded(shape, rank, "F"), _padded(shape, rank, "B"), warmup)
        return _existing(shape, order)

    return _rows(shape, row)


def _padded(shape: Shape, rank: int, kind: Kind) -> list[Action]:
    """The actions of one kind in order, as if microbatches were a multiple of ranks."""
    chunks = range(shape.chunks) if kind == "F" else range(shape.chunks - 1, -1, -1)
    return [
        Action(kind, chunk * shape.ranks + rank, microbatch)
        for first in range(0, shape.microbatches, shape.ranks)
        for chunk in chunks
        for microbatch in range(first, first + shape.ranks)
    ]


def _existing(shape: Shape, order: Sequence[Action]) -> list[Action]:
    return [action for action in order if action.microbatch < shape.microbatches]


def _own(shape: Shape, rank: int, kind: Kind) -> list[Action]:
    """All actions of one kind on `rank`: P microbatches through each chunk, then the next P."""
    return _existing(shape, _padded(shape, rank, kind))


def _in_turn(first: Sequence[Action], second: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` of `first`, then one of each in turn, then the rest of `second`."""
    order = list(first[:warmup])
    for at, action in enumerate(second):
        order += [*first[warmup + at : warmup + at + 1], action]
    return order


def _weights_after(order: Sequence[Action], late: int) -> list[Action]:
    """`order` with a weight gradient after each input gradient, `late` microbatches behind."""
    waiting: list[Action] = []
    result: list[Action] = []
    for action in order:
        result.append(action)
        if action.kind == "I":
            waiting.append(Action("W", action.stage, action.microbatch))
            if len(waiting) > late:
                result.append(waiting.pop(0))
    return result + waiting


def _backward_first(action: Action) -> tuple[bool, int]:
    return action.kind == "F", action.microbatch


def _active(shape: Shape) -> int:
    """Microbatches in flight on the first rank: no more than P are of use to 1F1B."""
    return min(shape.active or shape.ranks, shape.ranks)


def _one_chunk(shape: Shape, name: str) -> None:
    if shape.chunks != 1:
        raise ConfigError(
            f"{name} has one chunk a rank, not {shape.chunks}: use backend.chunks=1, or "
            "backend.schedule=interleaved.",
            path="backend.chunks",
            value=shape.chunks,
            needs=["backend.schedule"],
        )


def _rows(shape: Shape, row: Callable[[int], list[Action]]) -> Rows:
    return tuple(tuple(row(rank)) for rank in range(shape.ranks))
