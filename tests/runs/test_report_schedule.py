"""The schedule of a real pipeline in its report: what stages did when, and in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktrainer.runs.report_page import report_page
from ktrainer.runs.report_schedule import MOST_SPANS, MOST_STEPS, measured_schedule, seconds_by_kind
from ktrainer.runs.run_record import RunRecord
from ktrainer.runtime.history_file import NAME, append
from tests.processes import ktrainer
from tests.runs.browser import Browser

SCRIPT = Path(__file__).parents[1] / "callbacks" / "profiled_script.py"
WORDS = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=4")
HOSTILE = "</script><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two stages whose updates 21 and 22 were traced."""
    folder = tmp_path_factory.mktemp("pipeline")
    words = (*WORDS, "trainer.profile.steps=21-22", "run.dir=run")
    done = ktrainer("run", "-n", 2, SCRIPT, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def of_trace(folder: Path, events: list[dict[str, Any]], partitions: Any = (0, 1)) -> RunRecord:
    """A run of a pipeline whose trace has these events."""
    settings = {"backend": {"name": "pipeline"}}
    append(folder / NAME, "start", step=0, epoch=0, settings=settings)
    about = {"partitions": list(partitions)}
    trace = {"traceEvents": events, "otherData": about}
    (folder / "trace.json").write_text(json.dumps(trace))
    return RunRecord(folder)


def span(cat: str, name: str, pid: int, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 0, "ts": ts, "dur": dur}


def test_the_actions_of_each_stage_in_their_order(run: Path) -> None:
    found = measured_schedule(RunRecord(run))
    assert found is not None
    assert found.note == ""
    assert [step["label"] for step in found.steps] == ["step 21", "step 22"]
    for step in found.steps:
        first, last = step["lanes"]
        assert (first["name"], last["name"]) == ("stage 0", "stage 1")
        orders = [[s[1] for s in lane["spans"] if s[0] != "waits"] for lane in step["lanes"]]
        assert orders[1] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]  # one F, one B
        assert sorted(orders[0]) == sorted(orders[1])
        spans = {(k, s[1]): s for k, lane in enumerate(step["lanes"]) for s in lane["spans"]}
        for number in range(4):  # on one clock: a stage ends with what the other one has begun
            for kind, maker in (("F", 0), ("B", 1)):
                _, _, begin, *_ = spans[maker, f"{kind}{number}"]
                _, _, taken, seconds, *_ = spans[1 - maker, f"{kind}{number}"]
                assert begin < taken + seconds
        assert min(s[2] for lane in step["lanes"] for s in lane["spans"]) == 0.0
        assert any(s[0] == "waits" for s in last["spans"])


def test_a_browser_draws_them(run: Path, tab: Browser, tmp_path: Path) -> None:
    record, page = RunRecord(run), tmp_path / "report.html"
    page.write_text(report_page([record], "1"))
    found = measured_schedule(record)
    assert found is not None
    for width in (1280, 400):
        tab.open(page, width)
        assert tab.errors == []
        rects = "document.querySelectorAll('#schedule svg rect').length"
        assert tab.evaluate(rects) == sum(len(each["spans"]) for each in found.steps[1]["lanes"])
        tab.evaluate(
            "(() => { const s = document.querySelector('#schedule select'); s.selectedIndex = 0;"
            " s.dispatchEvent(new Event('change')); })()"
        )
        assert tab.evaluate(rects) == sum(len(each["spans"]) for each in found.steps[0]["lanes"])
        names = "[...document.querySelectorAll('#schedule svg text.name')].map(t => t.textContent)"
        assert tab.evaluate(names) == ["stage 0", "stage 1"]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_times_and_sums(tmp_path: Path) -> None:
    events = [
        span("steps", "step 9", 0, 1000.0, 100.0),
        span("pipeline", "F0", 0, 1010.0, 20.0),
        span("pipeline", "W0", 0, 1040.0, 5.0),
        span("pipeline", "F0", 0, 2000.0, 5.0),  # of no step
        span("messages", "wait for gradients", 0, 1030.0, 10.0),
        span("steps", "step 9", 1, 1020.0, 100.0),
        span("pipeline", "I0", 1, 1030.0, 1.0),
    ]
    found = measured_schedule(of_trace(tmp_path, events, [1, 0]))
    assert found is not None
    (step,) = found.steps
    first, second = step["lanes"]  # by stage
    assert first == {"name": "stage 0", "spans": [["input gradient", "I0", 2e-5, 1e-6]]}
    assert second["name"] == "stage 1"
    assert [each[:3] for each in second["spans"]] == [
        ["forward", "F0", 0.0],
        ["weight gradient", "W0", 3e-5],
        ["waits", "wait for gradients", 2e-5],
    ]
    assert seconds_by_kind(second) == {"forward": 2e-5, "weight gradient": 5e-6, "waits": 1e-5}


def test_replicas_several_stages_of_a_rank_and_many_steps(tmp_path: Path) -> None:
    events = []
    for step in range(30):
        for rank in range(4):
            events.append(span("steps", f"step {step}", rank, step * 10.0, 9.0))
            events.append(span("pipeline", "2F0", rank, step * 10.0, 1.0))
    found = measured_schedule(of_trace(tmp_path, events, [0, 1, 0, 1]))
    assert found is not None
    assert [step["label"] for step in found.steps] == [f"step {n}" for n in range(22, 30)]
    assert found.note == f"Of 30 traced steps, {MOST_STEPS} can be shown here."
    names = [lane["name"] for lane in found.steps[0]["lanes"]]
    assert names == [f"partition {p}, rank {r}" for p, r in [(0, 0), (0, 2), (1, 1), (1, 3)]]


def test_steps_without_actions_and_with_too_many(tmp_path: Path) -> None:
    events = [span("steps", f"step {n}", 0, n * 10.0, 9.0) for n in range(2 * MOST_STEPS)]
    found = measured_schedule(of_trace(tmp_path, [*events, span("pipeline", "F0", 0, 1.0, 1.0)]))
    assert found is not None
    assert [step["label"] for step in found.steps] == ["step 0"]
    events = [span("steps", "step 1", 0, 0.0, 9.0)]
    events += [span("pipeline", f"F{n}", 0, 1.0, 1.0) for n in range(MOST_SPANS + 1)]
    found = measured_schedule(of_trace(tmp_path, events))
    assert found is not None
    assert found.steps == []
    assert found.note == "The last step has over 20,000 actions and messages."


def test_what_a_report_says_where_nothing_can_be_drawn(tmp_path: Path, tab: Browser) -> None:
    record = of_trace(tmp_path, [span("steps", "step 1", 0, 0.0, 1.0)])
    assert "trace.json has no actions of a pipeline: trainer.profile.st" in report_page(
        [record], "1"
    )
    for text in ("{", "[]", '{"traceEvents": [1], "otherData": {"partitions": []}}'):
        (tmp_path / "trace.json").write_text(text)
        assert "trace.json cannot be read" in report_page([record], "1")
    (tmp_path / "trace.json").unlink()
    assert "It was not measured: trainer.profile.steps=50-60 records" in report_page([record], "1")
    events = [span("steps", HOSTILE, 0, 0.0, 9.0), span("pipeline", HOSTILE, 0, 1.0, 1.0)]
    page = tmp_path / "report.html"
    page.write_text(report_page([of_trace(tmp_path, events)], "1"))
    tab.open(page)
    assert tab.errors == []
    assert tab.evaluate("document.title").startswith("ktrainer report")
    assert tab.evaluate("document.querySelectorAll('#schedule svg rect').length") == 1


def test_a_run_without_a_pipeline_has_no_such_section(tmp_path: Path) -> None:
    append(tmp_path / NAME, "start", step=0, epoch=0, settings={"backend": {"name": "local"}})
    assert measured_schedule(RunRecord(tmp_path)) is None
    assert "schedule</h2>" not in report_page([RunRecord(tmp_path)], "1")
