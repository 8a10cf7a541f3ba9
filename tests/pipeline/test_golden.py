"""The grids of all schedules, stages 1 to 4 x microbatches 1 to 9, as files to read.

After an intended change, write them again and read the difference:

    KTRAINER_WRITE_GOLDEN=1 python -m pytest tests/pipeline/test_golden.py
    git diff tests/pipeline
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktrainer.backends.pipeline.schedules.make_schedule import SCHEDULES, make_schedule
from ktrainer.backends.pipeline.schedules.schedule_text import schedule_text

GOLDEN = Path(__file__).parent / "golden"
# The name of the file: the schedule, its chunks, and the microbatches in flight.
FILES = {
    "gpipe": ("gpipe", 1, None),
    "1f1b": ("1f1b", 1, None),
    "1f1b_2_active": ("1f1b", 1, 2),
    "interleaved": ("interleaved", 1, None),
    "interleaved_2_chunks": ("interleaved", 2, None),
    "interleaved_2_chunks_3_active": ("interleaved", 2, 3),
    "zero_bubble": ("zero_bubble", 1, None),
    "zero_bubble_2_active": ("zero_bubble", 1, 2),
    "forward_only": ("forward_only", 1, None),
    "forward_only_2_chunks": ("forward_only", 2, None),
}


def grids(name: str, chunks: int, active: int | None) -> str:
    parts = [f"{name}, {chunks} chunks a rank, active_microbatches {active}"]
    for ranks in range(1, 5):
        for microbatches in range(1, 10):
            schedule = make_schedule(name, ranks, microbatches, chunks, active)
            parts.append(f"{ranks} ranks, {microbatches} microbatches\n{schedule_text(schedule)}")
    return "\n\n".join(parts) + "\n"


@pytest.mark.parametrize("file", FILES)
def test_grids(file):
    path = GOLDEN / f"{file}.txt"
    found = grids(*FILES[file])
    if os.environ.get("KTRAINER_WRITE_GOLDEN"):
        path.write_text(found)
    assert found == path.read_text()


def test_every_schedule_has_a_file():
    assert {name for name, *_ in FILES.values()} == set(SCHEDULES)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FILES)
