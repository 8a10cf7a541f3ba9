"""The parts of a plan's report: sizes, tables, pictures, and what optimizers keep."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import keras
import pytest

from ktrainer.backends.pipeline.partition.balance import balance_stages
from ktrainer.backends.pipeline.partition.costs import state_factor
from ktrainer.backends.pipeline.partition.partition_inputs import NodeFacts, Settings
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.schedules.timeline import Costs, make_timeline
from ktrainer.plan_report.rendering import bytes_text, grid_text, svg, table
from ktrainer.plan_report.report import stage_costs

_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e9, "2.0 GB"), (5e15, "5000.0 TB")],
)
def test_sizes(count, text):
    assert bytes_text(count) == text


def test_a_table_is_aligned():
    assert table([("a", "bb"), ("ccc", "d")]) == "  a  bb\nccc   d"


@pytest.mark.parametrize("name, chunks", [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 3)])
@pytest.mark.parametrize("width", [60, 100])
def test_a_grid_fits_the_screen(name, chunks, width):
    text = grid_text(make_schedule(name, 4, 30, chunks), width)
    rows = [line for line in text.splitlines() if line.startswith("rank")]
    assert max(map(len, rows)) <= width
    assert max(map(len, rows)) > width - 12
    assert "…" in rows[0]


@pytest.mark.parametrize(
    "optimizer, factor",
    [
        (keras.optimizers.SGD(0.1), 2),
        (keras.optimizers.SGD(0.1, momentum=0.9), 3),
        (keras.optimizers.Adam(), 4),
        (keras.optimizers.Adam(use_ema=True), 5),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 4),
        (None, 1),
    ],
)
def test_what_optimizers_keep(optimizer, factor):
    assert state_factor(optimizer) == factor


def test_a_picture_has_a_block_for_each_action():
    schedule = make_schedule("zero_bubble", 3, 4)
    timeline = make_timeline(schedule, Costs.of(3, forward=[1, 2, 0.5], activation=0.25))
    root = ET.fromstring(svg(timeline))
    blocks = root.findall(f"{_SVG}g")
    assert len(blocks) == 3 * 4 * 3
    width = float(root.attrib["width"])
    for block in blocks:
        rect = block.find(f"{_SVG}rect")
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
    said = [text.text for text in root.iter(f"{_SVG}text")]
    assert {"rank 0", "rank 2", "forward", "input gradient", "weight gradient"} <= set(said)
    assert "backward" not in said


def test_costs_of_stages_for_a_simulation():
    nodes = [NodeFacts("a", 3.0, (), ("x",)), NodeFacts("b", 6.0, ("x",), ("y",))]
    made = balance_stages(nodes, {"x": 10, "y": 10}, ["y"], 2, Settings(time_per_byte=0.2))
    costs = stage_costs(made)
    assert (costs.forward, costs.backward, costs.activation) == ((1, 2), (2, 4), (1,))
    again = stage_costs(made, recompute=True)
    assert (again.forward, again.backward) == ((1, 2), (3, 6))
    assert again.weight_grad == pytest.approx(costs.weight_grad)
