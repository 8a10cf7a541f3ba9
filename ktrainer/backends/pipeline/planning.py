"""Planning: from a model and the configuration to its stages and schedule.

    model -> graph -> cost of each node -> stages (patterns, scopes, or the best cuts) -> StagePlan

Every rank makes the same plan by itself. Costs of `profile` differ from run to run, so they are
measured on rank 0 and broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import keras

from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.backends.pipeline.graph.trace import trace_open
from ktrainer.backends.pipeline.partition.balance import assigned, balance_stages
from ktrainer.backends.pipeline.partition.costs import describe, node_costs
from ktrainer.backends.pipeline.partition.manual_stages import (
    stages_by_name,
    stages_by_pattern,
    stages_by_scope,
)
from ktrainer.backends.pipeline.partition.partition_inputs import Settings
from ktrainer.backends.pipeline.partition.stage_assignment import StageAssignment
from ktrainer.backends.pipeline.partition.stage_graphs import StageGraph, cut_graph
from ktrainer.backends.pipeline.schedules.actions import Schedule
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.config import PipelineConfig
from ktrainer.config.pipeline_checks import memory_limit, stage_patterns

# A nominal processor and link: 5e10 operations and 5e9 bytes a second. Both ways, a byte over a
# cut takes as long as 20 operations; the backward pass is twice the forward pass, which alone is
# counted, so that is 20 / 3 of those. Other costs are in no unit of time.
_TIME_PER_BYTE = {"profile": 2 / 5e9, "flops": 2 / 5e9 * 5e10 / 3}


@dataclass(frozen=True, eq=False)
class StagePlan:
    """A model cut into stages, and their schedule.

    Attributes:
        graph: the model's graph for training, or for inference.
        assignment: the stages; prints as a table.
        stage_of: the stage of each node of the graph, in its order.
        schedule: of an update.
        costs: of each node: operations, seconds or parameters, as `backend.costs` says.
        batch: examples in a microbatch that sizes and costs are for.
    """

    graph: Graph
    assignment: StageAssignment
    stage_of: tuple[int, ...]
    schedule: Schedule
    costs: tuple[float, ...]
    batch: int

    def cut(self, graph: Graph) -> tuple[StageGraph, ...]:
        """The stages of another graph of the same model, cut alike: that for inference, or one of
        other shapes.

        Raises:
            ModelError: see `cut_graph`.
        """
        stage_of = stages_by_name(self.assignment.stage_of, graph)
        return cut_graph(graph, stage_of, self.schedule.stages)


def plan_stages(
    model: Any,
    inputs_spec: Any,
    config: PipelineConfig,
    *,
    microbatches: int,
    batch: int,
    state_factor: float,
    training: bool = True,
    costs: Sequence[float] | None = None,
) -> StagePlan:
    """Trace a model, cut it into stages, and make its schedule.

    Nothing is allocated: variables without values, of a model made in
    `keras.StatelessScope(initialize_variables=False)`, or not built before, have none afterwards.
    The same arguments give the same plan, but for the costs of `profile`.

    Args:
        model: any Keras model that can be traced.
        inputs_spec: a batch of its inputs, or their shapes and types, as for `trace_open`.
        config: the pipeline's keys.
        microbatches: parts of all batches of an update.
        batch: examples in one of them.
        state_factor: bytes in memory for each byte of a trainable variable, for the variable
            itself, its gradient and its optimizer slots.
        training: the mode that the graph is traced in.
        costs: of each node, in place of what `config.costs` says; from another rank, for one.

    Raises:
        ModelError: the model cannot be traced.
        ConfigError: it cannot be cut, or not as the configuration says.
    """
    count = config.partitions * config.chunks
    schedule = make_schedule(
        config.schedule, config.partitions, microbatches, config.chunks, config.active_microbatches
    )
    # The outermost scope: when one ends without this, Keras gives all variables their values.
    with keras.StatelessScope(initialize_variables=False):
        graph = trace_open(model, inputs_spec, training=training)
        measured = node_costs(graph, config.costs, batch=batch) if costs is None else list(costs)
    nodes, sizes, outputs = describe(graph, measured, batch=batch)
    settings = _settings(config, schedule, state_factor)
    by_hand = _stages_by_hand(graph, config, count)
    if by_hand is None:
        made = balance_stages(nodes, sizes, outputs, count, settings)
    else:
        made = assigned(nodes, sizes, outputs, by_hand, count, settings)
    return StagePlan(
        graph=graph,
        assignment=made,
        stage_of=tuple(made.stage_of[node.name] for node in graph.nodes),
        schedule=schedule,
        costs=tuple(measured),
        batch=batch,
    )


def _settings(config: PipelineConfig, schedule: Schedule, state_factor: float) -> Settings:
    return Settings(
        optimize=config.optimize,
        memory_weight=config.memory_weight,
        memory_limit=memory_limit(config),
        time_per_byte=_TIME_PER_BYTE.get(config.costs, 0.0),
        state_factor=state_factor,
        in_flight=activations_by_stage(schedule),
        whole=recomputed_by_stage(schedule) if config.recompute else None,
    )


def trace_inference(model: Any, inputs_spec: Any, training: Graph) -> Graph:
    """Trace the graph for inference of a model planned with `training`; nothing is allocated.

    Raises:
        ModelError: it cannot be traced.
    """
    with keras.StatelessScope(initialize_variables=False):
        return trace_open(model, inputs_spec, training=False, like=training)


def activations_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The most microbatches of which each stage keeps activations at one time; at least 1."""
    return _most_by_stage(schedule, {"F": 1, "B": -1, "I": 0, "W": -1})


def recomputed_by_stage(schedule: Schedule) -> tuple[int, ...]:
    """The same with recomputation, which keeps all activations only during a backward pass.

    Of other microbatches it keeps what the stage received.
    """
    return _most_by_stage(schedule, {"F": 0, "B": 0, "I": 1, "W": -1})


def _most_by_stage(schedule: Schedule, change: Mapping[str, int]) -> tuple[int, ...]:
    most = []
    for stage in range(schedule.stages):
        row = schedule.actions[schedule.rank_of(stage)]
        kept = accumulate(change[action.kind] for action in row if action.stage == stage)
        most.append(max(1, max(kept)) if schedule.trains else 1)
    return tuple(most)


def _stages_by_hand(graph: Graph, config: PipelineConfig, count: int) -> list[int] | None:
    """The stage of each node as the configuration or the model's code says, or None."""
    default = config.default_partition
    if config.stages:
        return stages_by_pattern(stage_patterns(config), graph, default)
    if default is not None or any(node.stage is not None for node in graph.nodes):
        return stages_by_scope(graph, count, default or 0, config.chunks)
    return None
