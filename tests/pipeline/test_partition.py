"""Cuts are the best there are, within the limits, and what cannot be is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktrainer.backends.pipeline.partition.balance import assigned, balance_stages
from ktrainer.backends.pipeline.partition.partition_inputs import NodeFacts, Settings, Variable
from ktrainer.backends.pipeline.partition.stage_assignment import StageAssignment
from ktrainer.errors import ConfigError
from tests.dist.harness.group import ROOT

Problem = tuple[list[NodeFacts], dict[str, int], list[str]]


def chain(costs: list[float], sizes: list[int] | None = None, state: int = 0) -> Problem:
    """Nodes n0, n1, ... that each need what the one before makes."""
    nodes = [
        NodeFacts(
            f"n{i}",
            cost,
            (f"t{i - 1}",) if i else ("x",),
            (f"t{i}",),
            (Variable(f"v{i}", state, state // 4),) if state else (),
        )
        for i, cost in enumerate(costs)
    ]
    sizes = sizes or [0] * len(costs)
    return nodes, {"x": 1000, **{f"t{i}": s for i, s in enumerate(sizes)}}, [f"t{len(costs) - 1}"]


def stages_of(result: StageAssignment) -> list[list[str]]:
    return [list(stage.nodes) for stage in result.stages]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small graphs with skips, shared variables, and outputs that come early."""
    count = draw(st.integers(1, 7))
    pool = [
        Variable(f"v{i}", draw(st.integers(0, 50)), trainable=draw(st.booleans())) for i in range(4)
    ]
    nodes = []
    for i in range(count):
        earlier = ["x", *(f"t{j}" for j in range(i))]
        nodes.append(
            NodeFacts(
                f"n{i}",
                draw(st.integers(0, 20)),
                tuple(draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3))),
                (f"t{i}",),
                tuple(draw(st.lists(st.sampled_from(pool), unique=True, max_size=2))),
            )
        )
    sizes = {f"t{i}": draw(st.integers(0, 30)) for i in range(count)} | {"x": 5}
    made = [f"t{i}" for i in range(count)]
    return nodes, sizes, draw(st.lists(st.sampled_from(made), unique=True, min_size=1, max_size=2))


@settings(max_examples=150)
@given(
    problem=problems(),
    stages=st.integers(1, 4),
    weight=st.sampled_from([0, 0.2, 0.5, 0.8, 1]),
    rate=st.sampled_from([0, 0.1, 1.0]),
    held=st.integers(0, 3),
    whole=st.none() | st.integers(0, 2),
    slack=st.none() | st.integers(0, 100),
)
def test_cuts_are_as_good_as_the_best_of_all(
    problem: Problem,
    stages: int,
    weight: float,
    rate: float,
    held: int,
    whole: int | None,
    slack: int | None,
) -> None:
    nodes, sizes, outputs = problem
    stages = min(stages, len(nodes))
    flight = tuple(held + s % 2 for s in range(stages))
    free = Settings(memory_weight=weight, time_per_byte=rate, in_flight=flight, whole=whole)

    everything = []
    for cuts in combinations(range(1, len(nodes)), stages - 1):
        of = [sum(position >= cut for cut in cuts) for position in range(len(nodes))]
        everything.append(assigned(*problem, of, stages, free))
    peaks = [max(s.memory for s in p.stages) for p in everything]
    limit = None if slack is None else min(peaks) + slack
    fits = [p for p, peak in zip(everything, peaks, strict=True) if limit is None or peak <= limit]
    best = min(max(loads(p, problem, free)) for p in fits)

    limited = replace(free, memory_limit=limit)
    result = balance_stages(nodes, sizes, outputs, stages, limited)
    assert max(loads(result, problem, free)) == pytest.approx(best)
    assert limit is None or max(s.memory for s in result.stages) <= limit
    as_good = [p for p in fits if max(loads(p, problem, free)) <= best * (1 + 1e-12)]
    assert crossed(result) <= min(crossed(p) for p in as_good) + 1e-9


def loads(result: StageAssignment, problem: Problem, used: Settings) -> list[float]:
    """The loads by their definition: shares of the time and memory of a single stage."""
    nodes = problem[0]
    values = []
    for stage, held in zip(result.stages, used.held(len(result.stages)), strict=True):
        alone = Settings(memory_weight=used.memory_weight, in_flight=held.received, whole=held.made)
        whole = assigned(*problem, [0] * len(nodes), 1, alone).stages[0]
        time = stage.time / whole.cost if whole.cost else 0
        memory = stage.memory / whole.memory if whole.memory else 0
        values.append((1 - used.weight) * time + used.weight * memory)
    return values


def crossed(result: StageAssignment) -> int:
    return sum(stage.crossing_bytes for stage in result.stages)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    result = balance_stages(*chain([5, 1, 1, 1, 1, 1]), 2, Settings(memory_weight=0))
    assert stages_of(result) == [["n0"], ["n1", "n2", "n3", "n4", "n5"]]
    assert max(stage.time for stage in result.stages) == 5


def test_time_to_cross_a_cut_moves_it_to_where_little_crosses() -> None:
    problem = chain([1, 1, 1, 1], [100, 1, 100, 100])
    slow = Settings(memory_weight=0, time_per_byte=0.01)
    assert stages_of(balance_stages(*problem, 2, slow)) == [["n0", "n1"], ["n2", "n3"]]
    problem = chain([1, 1, 1, 1], [1, 200, 200, 0])
    assert stages_of(balance_stages(*problem, 2, slow)) == [["n0"], ["n1", "n2", "n3"]]


def test_among_equals_the_fewest_bytes_cross() -> None:
    problem = chain([2, 0, 0, 2], [30, 10, 20, 0])
    assert stages_of(balance_stages(*problem, 2, Settings(memory_weight=0))) == [
        ["n0", "n1"],
        ["n2", "n3"],
    ]


def test_a_skip_counts_on_every_cut_it_crosses_and_inputs_on_none() -> None:
    nodes, sizes, outputs = chain([1, 1, 1, 1], [8, 4, 2, 1])
    nodes[3] = NodeFacts("n3", 1, ("t2", "t0", "x"), ("t3",))
    result = balance_stages(nodes, sizes, outputs, 4)
    assert [s.crossing for s in result.stages] == [("t0",), ("t0", "t1"), ("t0", "t2"), ()]
    assert [s.crossing_bytes for s in result.stages] == [8, 12, 10, 0]


def test_an_early_output_is_forwarded_to_the_last_stage() -> None:
    nodes, sizes, _ = chain([1, 1, 1], [8, 4, 2])
    result = balance_stages(nodes, sizes, ["t0", "t2"], 3)
    assert [s.crossing for s in result.stages] == [("t0",), ("t0", "t1"), ()]


def test_memory_weight_goes_from_time_only_to_memory_only() -> None:
    nodes, sizes, outputs = chain([8, 1, 1, 1])
    nodes = [
        NodeFacts(n.name, n.cost, n.inputs, n.outputs, (Variable(n.name, b),))
        for n, b in zip(nodes, [0, 0, 0, 100], strict=True)
    ]

    def first(**chosen: object) -> int:
        return len(balance_stages(nodes, sizes, outputs, 2, Settings(**chosen)).stages[0].nodes)  # type: ignore[arg-type]

    assert first(memory_weight=0) == 1
    assert first(optimize="speed") == 1
    assert first(optimize="memory") == 3
    assert (Settings().weight, Settings(optimize="memory").weight) == (0.2, 0.8)


def test_shared_variables_count_once_a_stage_and_are_reported_across() -> None:
    nodes, sizes, outputs = chain([1, 1, 1, 1])
    tied = Variable("tied", 400, 100)
    nodes = [
        NodeFacts(n.name, n.cost, n.inputs, n.outputs, (tied,) if i in (0, 1, 3) else ())
        for i, n in enumerate(nodes)
    ]
    result = balance_stages(nodes, sizes, outputs, 2, Settings(memory_weight=0, in_flight=0))
    assert [s.bytes for s in result.stages] == [400, 400]
    assert [s.parameters for s in result.stages] == [100, 100]
    assert [s.memory for s in result.stages] == [1600, 1600]
    assert result.shared == {"tied": (0, 1)}


def test_memory_counts_slots_activations_and_what_comes_in() -> None:
    problem = chain([1, 1], [10, 20], state=100)
    result = balance_stages(*problem, 2, Settings(state_factor=3, in_flight=(2, 1)))
    assert [s.memory for s in result.stages] == [300 + 2 * 10, 300 + 20 + 10]


def test_a_limit_moves_the_cuts() -> None:
    problem = chain([9, 1, 1, 1], state=100)
    free = balance_stages(*problem, 2, Settings(memory_weight=0, in_flight=0))
    assert [len(s.nodes) for s in free.stages] == [1, 3]
    tight = Settings(memory_weight=0, in_flight=0, memory_limit=800)
    assert [len(s.nodes) for s in balance_stages(*problem, 2, tight).stages] == [2, 2]


def test_a_limit_that_cannot_be_met_is_refused_with_the_least_that_can() -> None:
    problem = chain([1, 1, 1, 1], state=100)
    with pytest.raises(ConfigError, match=r"^backend.memory_limit: .*least that does is 800") as e:
        balance_stages(*problem, 2, Settings(memory_limit=799, in_flight=0))
    assert e.value.path == "backend.memory_limit"
    balance_stages(*problem, 2, Settings(memory_limit=800, in_flight=0))
    with pytest.raises(ConfigError, match="least limit that these stages keep is 1200"):
        assigned(*problem, [0, 1, 1, 1], 2, Settings(memory_limit=800, in_flight=0))


@pytest.mark.parametrize("stages, nearest", [(4, 3), (0, 1), (-2, 1)])
def test_numbers_of_stages_that_cannot_be(stages: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"backend.partitions: .* legal value is {nearest}\."):
        balance_stages(*chain([1, 1, 1]), stages)


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"optimize": "sped"}, "backend.optimize: .*Did you mean 'speed'"),
        ({"memory_weight": 1.5}, "backend.memory_weight: .*nearest legal value is 1"),
    ],
)
def test_settings_that_make_no_sense(chosen: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance_stages(*chain([1, 1]), 2, Settings(**chosen))


def test_assigned_refuses_backwards_and_empty_stages() -> None:
    with pytest.raises(ConfigError, match="'n1' on stage 0 needs 't0', which stage 1 makes"):
        assigned(*chain([1, 1]), [1, 0], 2)
    with pytest.raises(ConfigError, match="stage 1 has no layers"):
        assigned(*chain([1, 1]), [0, 2], 3)


def test_assigned_stages_need_not_be_contiguous() -> None:
    nodes = [
        NodeFacts("a", 1, ("x",), ("a",)),
        NodeFacts("b", 1, ("x",), ("b",)),
        NodeFacts("a2", 1, ("a",), ("a2",)),
        NodeFacts("end", 1, ("a2", "b"), ("end",)),
    ]
    sizes = dict.fromkeys(("x", "a", "b", "a2", "end"), 1)
    result = assigned(nodes, sizes, ["end"], [0, 1, 0, 1], 2)
    assert stages_of(result) == [["a", "a2"], ["b", "end"]]
    assert result.stages[0].crossing == ("a2",)


def test_a_long_chain_is_cut_evenly_and_quickly() -> None:
    result = balance_stages(*chain([1.0] * 600, [1] * 600, state=4), 8, Settings())
    assert {len(s.nodes) for s in result.stages} == {75}


def test_it_prints_as_a_table() -> None:
    problem = chain([1, 2, 3], [1000, 2000, 4], state=4000)
    lines = str(balance_stages(*problem, 2, Settings(memory_weight=0))).splitlines()
    assert " ".join(lines[0].split()) == "stage nodes parameters bytes cost crossing after it"
    assert " ".join(lines[1].split()) == "0 n0 .. n1 (2) 2,000 8,000 3 2,000 B: t1"
    assert " ".join(lines[2].split()) == "1 n2 1,000 4,000 3 -"


def test_it_needs_no_tensorflow() -> None:
    code = (
        "import sys, ktrainer.backends.pipeline.partition.balance; "
        "assert not {'tensorflow', 'keras'} & {*sys.modules}"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
