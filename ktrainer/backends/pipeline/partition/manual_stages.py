"""Stages set by the user: `with partition(i):` scopes in the model's code, or name patterns.

Both give only some of the nodes a stage. The others: nodes without variables, and those on which no
output depends, stay with what they are computed from; nodes with variables go to the default stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ktrainer.backends.pipeline.graph.nodes import Graph
from ktrainer.config.name_patterns import compile_pattern, matches, refuse_unmatched
from ktrainer.errors import ConfigError

_KEY = "backend.stages"


def stages_by_scope(graph: Graph, stages: int, default: int = 0, chunks: int = 1) -> list[int]:
    """The stage of each node of a graph, as the model's `partition` scopes say.

    Args:
        stages: how many there are.
        default: for nodes with variables outside of any scope.
        chunks: stages in each process.

    Raises:
        ConfigError: a scope names a stage that is not there, or data would flow backwards.
    """
    for node in graph.nodes:
        if node.stage is not None and node.stage >= stages:
            at = f" ({node.where})" if node.where else ""
            raise ConfigError(
                f"{node.name!r} is in a scope `partition({node.stage})`{at}, but there are "
                f"{stages} stages (partitions x chunks), numbered from 0: set it to "
                f"{node.stage // chunks + 1}, or the scope to at most {stages - 1}.",
                path="backend.partitions",
                value=stages // chunks,
            )
    if not 0 <= default < stages:
        raise ConfigError(
            f"must be from 0 to {stages - 1}, but is {default}.", path="backend.default_partition"
        )
    return _complete(graph, [node.stage for node in graph.nodes], default)


def stages_by_pattern(
    patterns: Mapping[int, str], graph: Graph, default: int | None = None
) -> list[int]:
    """The stage of each node of a graph, from patterns of layer names.

    Args:
        patterns: stage -> regular expression that must match a node's whole name, or the whole
            name of a layer that it is part of: `"block_[0-5]"` takes `block_3/attention/query`
            too, but neither `block_10` nor `decoder/block_1`.
        default: the stage of nodes with variables that no pattern matches; None to refuse them.

    Raises:
        ConfigError: stages are not numbered from 0, an expression is invalid or matches nothing,
            two match the same node, a node has no stage, or data would flow backwards.
    """
    compiled = _compiled(patterns, default)
    found: list[int | None] = []
    matched: set[int] = set()
    for node in graph.nodes:
        stages = [s for s, pattern in compiled.items() if matches(pattern, node.name)]
        matched.update(stages)
        if len(stages) > 1:
            raise ConfigError(
                f"{node.name!r} is matched by the patterns of stages {stages[0]} "
                f"({patterns[stages[0]]!r}) and {stages[1]} ({patterns[stages[1]]!r}). Make one "
                "of them narrower; a pattern must match whole names, from the model down.",
                path=_KEY,
            )
        found.append(stages[0] if stages else None)
    for stage in compiled.keys() - matched:
        refuse_unmatched(patterns[stage], (n.name for n in graph.nodes), f"{_KEY}.{stage}")
    if default is None:
        _refuse_unmatched(graph, found)
    return _complete(graph, found, default or 0)


def stages_by_name(stage_of: Mapping[str, int], graph: Graph) -> list[int]:
    """The stage of each node of a model's other graph, for inference or for training.

    Nodes that the partitioned graph does not have, because the model's code branches on the mode,
    stay with what they are computed from.

    Args:
        stage_of: node -> stage, of a `StageAssignment` of the one graph.
        graph: the other one.

    Raises:
        ConfigError: data would flow backwards in this graph.
    """
    return _complete(graph, [stage_of.get(node.name) for node in graph.nodes], None)


def _compiled(patterns: Mapping[int, str], default: int | None) -> dict[int, re.Pattern[str]]:
    given = {*patterns} if default is None else {*patterns, default}
    if given != {*range(len(given))}:
        raise ConfigError(
            f"stages are numbered from 0 without gaps, but these are {sorted(patterns)}.",
            path=_KEY,
        )
    return {
        stage: compile_pattern(pattern, f"{_KEY}.{stage}") for stage, pattern in patterns.items()
    }


def _refuse_unmatched(graph: Graph, found: Sequence[int | None]) -> None:
    read = _read(graph)
    # A node without inputs is computed from variables alone, where it is used.
    left = [
        node.name
        for node, stage in zip(graph.nodes, found, strict=True)
        if stage is None and node.variables and node.inputs and node.name in read
    ]
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise ConfigError(
            f"no pattern matches {', '.join(left[:5])}{more}. Add them to a stage's pattern, or "
            "set backend.default_partition to the stage of all others.",
            path=_KEY,
        )


def _read(graph: Graph) -> set[str]:
    """Names of the nodes that the model's outputs depend on."""
    needed, names = set(graph.needed_at_the_end), set()
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            names.add(node.name)
    return names


def _complete(graph: Graph, found: Sequence[int | None], default: int | None) -> list[int]:
    """A stage for every node, and a check that none of them sends data backwards.

    Nodes without a stage go to the default one if they have variables, the outputs depend on them,
    and there is a default, and else stay with their inputs.
    """
    read = _read(graph)
    stages: dict[int, int] = {}
    at: dict[int, int] = {}  # tensor -> stage that has it
    for position, (node, stage) in enumerate(zip(graph.nodes, found, strict=True)):
        before = [at[i] for i in node.inputs if i in at]
        if stage is None and not node.inputs:
            continue  # computed from variables alone: where it is first used, below
        if stage is None:
            has_own_place = node.variables and node.name in read
            go = default is not None and (has_own_place or not before)
            stage = default or 0 if go else max(before, default=0)
        stages[position] = stage
        at.update(dict.fromkeys(node.outputs, stage))
    for position, node in enumerate(graph.nodes):
        if position not in stages:
            users = [stages[p] for p, n in enumerate(graph.nodes) if {*n.inputs} & {*node.outputs}]
            stages[position] = min(users, default=default or 0)
    _refuse_backwards(graph, stages)
    return [stages[position] for position in range(len(graph.nodes))]


def _refuse_backwards(graph: Graph, stages: Mapping[int, int]) -> None:
    makers = {i: position for position, n in enumerate(graph.nodes) for i in n.outputs}
    for position, node in enumerate(graph.nodes):
        for maker in (makers[i] for i in node.inputs if i in makers):
            if stages[maker] > stages[position]:
                raise ConfigError(
                    f"{node.name!r} is on stage {stages[position]}, but needs what "
                    f"{graph.nodes[maker].name!r} on stage {stages[maker]} computes: data flows "
                    f"from lower to higher stages only. Put {node.name!r} on stage "
                    f"{stages[maker]} or higher, or {graph.nodes[maker].name!r} on stage "
                    f"{stages[position]} or lower.",
                    path=_KEY,
                )
