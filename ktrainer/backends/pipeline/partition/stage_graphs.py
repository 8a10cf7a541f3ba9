"""A graph cut into stages: what each computes, receives and sends.

Stages send to their neighbours only: a tensor that is needed two stages later is forwarded by the
stage between them. Inputs of the model are never sent, since every process has the
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ktrainer.backends.pipeline.graph.nodes import Graph, Node
from ktrainer.errors import ModelError


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage of a model's graph.

    Attributes:
        index: from 0.
        graph: of the whole model.
        nodes: this stage's, in topological order.
        inputs: ids of the model's inputs that it needs; all of them on the last stage, where
            the loss is computed.
        receives: ids of the tensors that it gets from the stage before.
        sends: ids of the tensors that the stage after gets.
        is_last: whether outputs, loss and metrics are computed here.
        unread: trained variables that no node of any stage reads, but that have a regularisation
            loss; the first stage's.
    """

    index: int
    graph: Graph
    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    is_last: bool
    unread: tuple[Any, ...] = ()

    @property
    def trainable(self) -> list[Any]:
        """The trained variables that its loss depends on, each once."""
        return _each_once((*(v for node in self.nodes for v in node.trainable), *self.unread))

    @property
    def non_trainable(self) -> list[Any]:
        """The other variables that its nodes read, each once."""
        return _each_once(v for node in self.nodes for v in node.non_trainable)


def cut_graph(graph: Graph, stage_of: Sequence[int], stages: int) -> tuple[StageGraph, ...]:
    """The stages of `graph`.

    Args:
        stage_of: the stage of each node; data flows to higher stages only.
        stages: how many there are.

    Raises:
        ModelError: a string would go from one stage to another.
    """
    placed = list(zip(graph.nodes, stage_of, strict=True))
    made = {i: stage for node, stage in placed for i in node.outputs}
    last_reader = _last_readers(graph, placed, stages)

    def crossing(cut: int) -> tuple[int, ...]:
        found = tuple(i for i, stage in made.items() if stage <= cut < last_reader.get(i, 0))
        _refuse_strings(graph, found, cut)
        return found

    result = []
    for index in range(stages):
        nodes = tuple(node for node, stage in placed if stage == index)
        read = {i for node in nodes for i in node.inputs}
        last = index == stages - 1
        result.append(
            StageGraph(
                index=index,
                graph=graph,
                nodes=nodes,
                inputs=tuple(i for i in graph.inputs if last or i in read),
                receives=crossing(index - 1) if index else (),
                sends=() if last else crossing(index),
                is_last=last,
                unread=() if index else _regularised(graph.unused),
            )
        )
    return tuple(result)


def _last_readers(graph: Graph, placed: Sequence[tuple[Node, int]], stages: int) -> dict[int, int]:
    """The last stage that reads each tensor; `placed` are the nodes with their stages."""
    last = dict.fromkeys(graph.needed_at_the_end, stages - 1)
    for node, stage in placed:
        for i in node.inputs:
            last[i] = max(stage, last.get(i, 0))
    return last


def _refuse_strings(graph: Graph, crossing: Sequence[int], cut: int) -> None:
    for i in crossing:
        if graph.tensors[i].dtype == "string":
            raise ModelError(
                f"{graph.tensors[i].name!r} makes strings, and is on stage {cut} or before, but is "
                f"needed on stage {cut + 1} or after: only numbers go from stage to stage. Put "
                "what makes numbers of them on the same stage, with backend.stages or `with "
                "ktrainer.partition(i):`, or look strings up before the model, in its data"
            )


def is_differentiable(spec: Any) -> bool:
    """Return whether a tensor of this spec, with a `dtype`, has a gradient."""
    dtype = tf.as_dtype(spec.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def _regularised(variables: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(v for v in variables if v.trainable and v.regularizer is not None)


def _each_once(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())
