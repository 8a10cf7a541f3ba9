"""What benchmarks record, and the table, the JSON file and the picture made of it."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks.results import BEGIN, END, OURS, collect, draw, put_into, record, table, write_json


@pytest.fixture
def results(tmp_path):
    """Two turns of a program and one of a peer's, and what has neither peer nor rounds to spare."""
    file = tmp_path / "results.jsonl"
    for ours in ([9.0, 11.0], [10.0, 50.0, 10.0]):
        record(file, "step", "64 rows", {OURS: ours, "alone": [8.0] * len(ours)}, bound="alone")
        record(file, "step", "64 rows", {"Peer 1.2": [20.0, 21.0, 4.0]})
    record(file, "step", "64 rows", {"Other": [5.0]})
    record(file, "pause", "1 GB", {OURS: [1234.5]}, unit="s")
    record(file, "a program that failed", "1 GB", {"Peer 1.2": [1.0]})
    return collect(file)


def test_values_of_all_turns_are_one_result_for_each_peer(results):
    first, second, alone = results
    assert (first.ours, first.peer, first.bound, first.rounds) == (10.0, 20.0, 8.0, 5)
    assert (first.to_peer, first.to_bound) == (0.5, 1.25)
    assert (second.peer_name, second.to_peer, second.rounds) == ("Other", 2.0, 1)
    assert (alone.ours, alone.to_peer, alone.to_bound) == (1234.5, None, None)


def test_nothing_is_recorded_without_a_file():
    record(None, "step", "64 rows", {OURS: [1.0]})


def test_table_has_a_line_for_each_result(results):
    lines = table(results).splitlines()
    assert lines[2:] == [
        "| step | 64 rows | 10.00 ms | 20.00 ms (Peer 1.2) | 8.00 ms (alone) | 0.50 | 1.25 | 5 |",
        "| step | 64 rows | 10.00 ms | 5.00 ms (Other) | 8.00 ms (alone) | 2.00 | 1.25 | 1 |",
        "| pause | 1 GB | 1234 s | - | - | - | - | 1 |",
    ]
    assert {line.count("|") for line in lines} == {9}


def test_json_has_ratios_and_the_machine(results, tmp_path):
    file = tmp_path / "results.json"
    write_json(file, results, {"cpus": 2})
    written = json.loads(file.read_text())
    assert written["cpus"] == 2
    assert [row["to_peer"] for row in written["results"]] == [0.5, 2.0, None]


@pytest.mark.parametrize("count", [0, 3])
def test_picture_names_each_ratio(results, tmp_path, count):
    file = tmp_path / "results.svg"
    draw(file, results[:count])
    texts = {element.text for element in ElementTree.parse(file).iter() if element.text}
    assert ({"step: Peer 1.2", "step: Other", "step: alone", "0.50", "2.00"} <= texts) == bool(
        count
    )


def test_page_keeps_what_is_around_the_table(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    put_into(page, "new\n")
    put_into(page, "newer\n")
    assert page.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
    page.write_text(BEGIN)
    with pytest.raises(ValueError, match="lacks the lines"):
        put_into(page, "new\n")
