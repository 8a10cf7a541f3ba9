"""Cut a model into pipeline stages, so that the slowest stage is as fast as can be.

Pure: it knows nothing of Keras, only the cost and size of each node of a graph in topological
order. Stages are contiguous in that order:

    node    0   1   2 | 3   4 | 5   6   7        cuts (3, 5) make 3 stages
                      |       |
    a skip from 1 to 6 is forwarded through stage 1: it crosses both cuts, and counts on both

A stage's load is (1 - w) * its fraction of the time + w * that of the memory, where w is
`memory_weight`, and the cuts minimise the greatest load; among those that do, what crosses the
cuts; among those, the sum of the squared loads. Exact, by dynamic programming over the positions
of the cuts (as torchgpipe's `BlockPartitioning` and GPipe's heuristics approximate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ktrainer.backends.pipeline.partition.optimal_cuts import Measures, best_cuts, least_peak
from ktrainer.backends.pipeline.partition.partition_inputs import NodeFacts, Settings
from ktrainer.backends.pipeline.partition.stage_assignment import StageAssignment, summarise
from ktrainer.errors import ConfigError


def balance_stages(
    nodes: Sequence[NodeFacts],
    tensors: Mapping[str, int],
    outputs: Sequence[str],
    stages: int,
    settings: Settings | None = None,
) -> StageAssignment:
    """The best way to cut nodes into contiguous stages.

    Args:
        nodes: in topological order.
        tensors: bytes of each tensor, for one microbatch.
        outputs: tensors that the last stage needs at the end, for the loss.
        stages: how many, each of at least one node.

    Raises:
        ConfigError: fewer nodes than stages, or no cuts that keep within the memory limit; names
            the nearest value that works.
    """
    settings = settings or Settings()
    settings.check()
    if not 1 <= stages <= len(nodes):
        nearest = min(max(stages, 1), len(nodes))
        raise ConfigError(
            f"the model has {len(nodes)} layers and ops, which cannot be cut into {stages} stages "
            f"of at least one each. The nearest legal value is {nearest}.",
            path="backend.partitions",
        )
    measures = measure(nodes, tensors, outputs, settings)
    held = settings.held(stages)
    cuts = best_cuts(measures, held, settings.weight, settings.memory_limit)
    if cuts is None:
        least = least_peak(measures, held)
        raise ConfigError(
            f"no way to cut the model into {stages} stages keeps each within "
            f"{settings.memory_limit} bytes. The least that does is {least}; or use more "
            "partitions, or smaller microbatches.",
            path="backend.memory_limit",
        )
    bounds = (0, *cuts, len(nodes))
    of = [s for s in range(stages) for _ in range(bounds[s], bounds[s + 1])]
    return summarise(nodes, tensors, outputs, of, settings)


def assigned(
    nodes: Sequence[NodeFacts],
    tensors: Mapping[str, int],
    outputs: Sequence[str],
    stage_of: Sequence[int],
    stages: int,
    settings: Settings | None = None,
) -> StageAssignment:
    """The assignment that a user has made by hand: the stage of each node.

    Stages need not be contiguous in topological order, but data must flow to higher stages only.

    Raises:
        ConfigError: a stage is empty, data would flow backwards, or a stage is over the limit.
    """
    settings = settings or Settings()
    settings.check()
    empty = sorted(set(range(stages)) - set(stage_of))
    if empty:
        raise ConfigError(
            f"stage {empty[0]} has no layers; give it some, or set backend.partitions to "
            f"{len(set(stage_of))}.",
            path="backend.stages",
        )
    _refuse_backwards(nodes, stage_of)
    result = summarise(nodes, tensors, outputs, stage_of, settings)
    over = [s for s in result.stages if settings.memory_limit and s.memory > settings.memory_limit]
    if over:
        raise ConfigError(
            f"stage {over[0].index} takes {over[0].memory} bytes, more than "
            f"{settings.memory_limit}. The least limit that these stages keep is "
            f"{max(s.memory for s in result.stages)}; or give some of its layers to another "
            "stage, or use more partitions, or smaller microbatches.",
            path="backend.memory_limit",
        )
    return result


def _refuse_backwards(nodes: Sequence[NodeFacts], stage_of: Sequence[int]) -> None:
    makers = {t: s for node, s in zip(nodes, stage_of, strict=True) for t in node.outputs}
    for node, stage in zip(nodes, stage_of, strict=True):
        late = next((t for t in node.inputs if makers.get(t, 0) > stage), None)
        if late is not None:
            raise ConfigError(
                f"{node.name!r} on stage {stage} needs {late!r}, which stage {makers[late]} "
                f"makes: data flows to higher stages only. Put {node.name!r} on stage "
                f"{makers[late]}.",
                path="backend.stages",
            )


def measure(
    nodes: Sequence[NodeFacts],
    tensors: Mapping[str, int],
    outputs: Sequence[str],
    settings: Settings,
) -> Measures:
    """Measures for the search: times, and sizes by position."""
    makers = {t: position for position, node in enumerate(nodes) for t in node.outputs}
    last = {t: position for position, node in enumerate(nodes) for t in node.inputs}
    last.update(dict.fromkeys(outputs, len(nodes)))
    # A tensor made at p and last used at q crosses the cuts before p + 1, ..., q.
    spans = [(made + 1, last[t], tensors[t]) for t, made in makers.items() if t in last]
    uses: dict[str, tuple[float, list[int]]] = {}
    for position, node in enumerate(nodes):
        for v in {v.name: v for v in node.variables}.values():
            size = v.bytes * (settings.state_factor if v.trainable else 1)
            uses.setdefault(v.name, (size, []))[1].append(position)
    return Measures.of(
        times=[node.cost for node in nodes],
        made=[sum(tensors[t] for t in node.outputs) for node in nodes],
        spans=spans,
        variables=list(uses.values()),
        time_per_byte=settings.time_per_byte,
    )
