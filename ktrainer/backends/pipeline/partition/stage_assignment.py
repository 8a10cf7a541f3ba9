"""The stage of each node, and the table that shows the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktrainer.backends.pipeline.partition.partition_inputs import NodeFacts, Settings


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        index: from 0.
        nodes: names, in topological order.
        parameters: of its distinct variables.
        bytes: of its distinct variables.
        cost: compute time of a microbatch.
        time: `cost` and the time of what crosses the cut behind it.
        memory: bytes of variables, gradients, slots, and of the activations in flight.
        crossing: names of the tensors sent over the cut behind it, forwarded ones included.
        crossing_bytes: their size, for a microbatch.
    """

    index: int
    nodes: tuple[str, ...]
    parameters: int
    bytes: int
    cost: float
    time: float
    memory: int
    crossing: tuple[str, ...]
    crossing_bytes: int


@dataclass(frozen=True)
class StageAssignment:
    """A model cut into stages; prints as a table.

    Attributes:
        stages: in the order of the data.
        stage_of: node -> index of its stage.
        shared: variables that more than one stage reads -> indices of these stages. Their
            gradients are to be summed.
    """

    stages: tuple[Stage, ...]
    stage_of: Mapping[str, int]
    shared: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        head = ("stage", "nodes", "parameters", "bytes", "cost", "crossing after it")
        rows = [head, *(_row(stage) for stage in self.stages)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
        lines = []
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        for name, stages in self.shared.items():
            lines.append(f"shared by stages {', '.join(map(str, stages))}: {name}")
        return "\n".join(lines)


def summarise(
    nodes: Sequence[NodeFacts],
    tensors: Mapping[str, int],
    outputs: Sequence[str],
    stage_of: Sequence[int],
    settings: Settings,
) -> StageAssignment:
    """The assignment of each node to the stage that `stage_of` says."""
    count = max(stage_of) + 1
    held = settings.held(count)
    crossing = _crossing(nodes, outputs, stage_of, count)
    stages = []
    for index in range(count):
        mine = [node for node, s in zip(nodes, stage_of, strict=True) if s == index]
        variables = {v.name: v for node in mine for v in node.variables}.values()
        cost = sum(node.cost for node in mine)
        sent = sum(tensors[t] for t in crossing[index])
        received = sum(tensors[t] for t in crossing[index - 1]) if index else 0
        made = sum(tensors[t] for node in mine for t in node.outputs)
        activations = held[index].received * received + held[index].made * made
        state = sum(v.bytes * (settings.state_factor if v.trainable else 1) for v in variables)
        stages.append(
            Stage(
                index=index,
                nodes=tuple(node.name for node in mine),
                parameters=sum(v.parameters for v in variables),
                bytes=sum(v.bytes for v in variables),
                cost=cost,
                time=cost + settings.time_per_byte * sent,
                memory=round(state + activations),
                crossing=crossing[index],
                crossing_bytes=sent,
            )
        )
    named = {node.name: s for node, s in zip(nodes, stage_of, strict=True)}
    return StageAssignment(tuple(stages), named, _shared(nodes, stage_of))


def _crossing(
    nodes: Sequence[NodeFacts], outputs: Sequence[str], stage_of: Sequence[int], count: int
) -> list[tuple[str, ...]]:
    """Tensors over the cut behind each stage: made there or before, needed after."""
    made = {t: s for node, s in zip(nodes, stage_of, strict=True) for t in node.outputs}
    needed = dict.fromkeys(outputs, count - 1)
    for node, stage in zip(nodes, stage_of, strict=True):
        for tensor in node.inputs:
            needed[tensor] = max(stage, needed.get(tensor, 0))
    return [
        tuple(t for t, first in made.items() if first <= cut < needed.get(t, 0))
        for cut in range(count)
    ]


def _shared(nodes: Sequence[NodeFacts], stage_of: Sequence[int]) -> dict[str, tuple[int, ...]]:
    readers: dict[str, set[int]] = {}
    for node, stage in zip(nodes, stage_of, strict=True):
        for variable in node.variables:
            readers.setdefault(variable.name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in readers.items() if len(stages) > 1}


def _row(stage: Stage) -> tuple[str, ...]:
    first, last = stage.nodes[0], stage.nodes[-1]
    span = first if first == last else f"{first} .. {last} ({len(stage.nodes)})"
    shown = ", ".join(stage.crossing[:3]) + (", ..." if len(stage.crossing) > 3 else "")
    size = f"{stage.crossing_bytes:,} B: {shown}" if stage.crossing else "-"
    return (
        str(stage.index),
        span,
        f"{stage.parameters:,}",
        f"{stage.bytes:,}",
        f"{stage.cost:.4g}",
        size,
    )
