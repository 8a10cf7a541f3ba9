"""The trace of `trainer.profile`: all ranks on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Callback, Trainer, load_config
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.schedules.timeline import Costs, Timeline, make_timeline
from ktrainer.callbacks.profile import Profile
from ktrainer.cli.main import main
from ktrainer.distributed.clock_offsets import clock_offset
from ktrainer.errors import ConfigError
from ktrainer.plan_report.planned_trace import add_plan
from ktrainer.state import trace_spans
from tests.processes import ktrainer

SCRIPT = Path(__file__).with_name("profiled_script.py")


def traced(
    folder: Path, *words: str, launch: tuple[str, ...] = ("-n", "2"), **environment: str
) -> dict[str, Any]:
    done = ktrainer("run", *launch, SCRIPT, *words, "run.dir=run", cwd=folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "run" / "trace.json").read_text())
    return found


def spans(trace: dict[str, Any], lane: str, rank: int) -> list[tuple[str, float, float]]:
    """Names, begins and ends in microseconds of a rank's spans in a lane, in order."""
    found = [e for e in trace["traceEvents"] if (e.get("cat"), e["pid"]) == (lane, rank)]
    return sorted(
        ((e["name"], e["ts"], e["ts"] + e["dur"]) for e in found), key=lambda each: each[1]
    )


def check_that_they_meet(trace: dict[str, Any], lane: str) -> None:
    """No span of ranks 0 and 1 ends before its like on the other one has begun."""
    error = trace["otherData"]["clock_error_seconds"] * 1e6
    assert error < 1e4  # clocks that are not compared are 1000 s apart
    for one, other in zip(*(spans(trace, lane, rank) for rank in range(2)), strict=True):
        assert max(one[1], other[1]) < min(one[2], other[2]) + error


def train(
    folder: Path,
    epochs: int = 1,
    more: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    fits: int = 1,
    **profile: Any,
) -> Path:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((64, 4), np.float32)
    more = more or {}
    keys = {
        **more,
        "run": {"dir": str(folder / "run")},
        "trainer": {**more.get("trainer", {}), "profile": profile},
        "logging": {"progress": "none"},
    }
    with Trainer(keys, callbacks or ()) as trainer:
        for _ in range(fits):
            trainer.fit(model, x, x[:, :1], batch_size=8, epochs=epochs)
    return folder / "run" / "trace.json"


def test_sums_of_ranks_meet_on_one_clock(tmp_path: Path) -> None:
    trace = traced(tmp_path, "backend=data_parallel", "trainer.profile.steps=21-23")
    for rank in range(2):
        steps = spans(trace, "steps", rank)
        assert [name for name, _, _ in steps] == ["step 21", "step 22", "step 23"]
        loop = spans(trace, "loop", rank)
        assert [name for name, _, _ in loop].count("compute") == 3
        sums = spans(trace, "gradients", rank)
        assert [name for name, _, _ in sums] == ["sum of a bucket, 0.014 MB"] * 3
        for (_, begin, end), (_, step_begin, step_end) in zip(sums, steps, strict=True):
            assert step_begin < begin < end < step_end
    check_that_they_meet(trace, "gradients")
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert [name.split(" (")[0] for name in sorted(names)] == ["rank 0", "rank 1"]


@pytest.mark.exhaustive
def test_the_actions_of_a_pipeline_and_its_plan(tmp_path: Path) -> None:
    words = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=4")
    trace = traced(tmp_path, *words, "trainer.profile.steps=21-22")
    assert trace["otherData"]["partitions"] == [0, 1]
    first, second = (spans(trace, "pipeline", rank) for rank in range(2))
    assert [n for n, _, _ in first[:8]] == ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"]
    assert [n for n, _, _ in second[:8]] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]
    error = trace["otherData"]["clock_error_seconds"] * 1e6
    for step in (0, 8):
        there, back = dict_of(first[step : step + 8]), dict_of(second[step : step + 8])
        for k in range(4):  # what a stage needs has left the other one before
            assert there[f"F{k}"][0] < back[f"F{k}"][1] + error
            assert back[f"B{k}"][0] < there[f"B{k}"][1] + error
    plan = ["plan", "--trace", "run/trace.json", SCRIPT, *words]
    done = ktrainer(*plan, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trace     run/trace-planned.json" in done.stdout
    planned = json.loads((tmp_path / "run" / "trace-planned.json").read_text())
    lanes = [spans(planned, "pipeline, as planned", rank) for rank in range(2)]
    for measured, lane in zip((first, second), lanes, strict=True):
        assert [name for name, _, _ in lane] == [name for name, _, _ in measured]
    ends = [
        max(end for lane in each for _, _, end in lane[:8]) for each in (lanes, (first, second))
    ]
    assert ends[0] == pytest.approx(ends[1], abs=0.1)
    for schedule, microbatches, said in (
        ("1f1b", 8, "has 16 actions, and the plan 32: plan with the settings"),
        ("gpipe", 4, "has the actions F0 F1 B0 F2 B1 F3 B2 B3 on rank 0, and the plan F0 F1 F2 F3"),
    ):
        with pytest.raises(ConfigError, match=said):
            add_plan(tmp_path / "run" / "trace.json", timeline(schedule, microbatches))


@pytest.mark.exhaustive
def test_a_replicated_pipeline_and_its_plan(tmp_path: Path) -> None:
    words = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2",
             "trainer.accumulate=2")  # fmt: skip
    trace = traced(tmp_path, *words, "trainer.profile.steps=9-12", launch=("-n", "4"))
    partitions = trace["otherData"]["partitions"]
    assert sorted(partitions) == [0, 0, 1, 1]
    done = ktrainer("plan", "-n", "4", "--trace", "run/trace.json", SCRIPT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    planned = json.loads((tmp_path / "run" / "trace-planned.json").read_text())
    for rank in range(4):
        names = [[n for n, _, _ in spans(planned, lane, rank)] for lane in
                 ("pipeline", "pipeline, as planned")]  # fmt: skip
        assert names[0] == names[1]
        assert len(names[0]) == 32


def timeline(schedule: str, microbatches: int) -> Timeline:
    return make_timeline(make_schedule(schedule, 2, microbatches), Costs.of(2))


def test_a_trace_has_no_schedule_without_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, config = tmp_path / "trace.json", tmp_path / "config.yaml"
    trace.write_text("{}")
    config.write_text("backend: data_parallel")
    assert main(["plan", "--trace", str(trace), str(config)]) == 2
    assert "--trace shows the schedule of a pipeline, and" in capsys.readouterr().err


def plan_of(folder: Path, trace: Any) -> None:
    path = folder / "trace.json"
    path.write_text(trace if isinstance(trace, str) else json.dumps(trace))
    add_plan(path, timeline("1f1b", 2))


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        ("{", "is no trace of trainer.profile"),
        ([1], "is no trace of trainer.profile"),
        ({"traceEvents": [{"ph": "X"}], "otherData": {"partitions": [0, 1]}}, "is no trace of"),
        ({"traceEvents": [], "otherData": {"partitions": [None, None]}}, "has no steps of a pipel"),
        ({"traceEvents": [], "otherData": {"partitions": [0, 1]}}, "has no steps of a pipeline"),
        ({"traceEvents": [], "otherData": {"partitions": [0, 1, 2]}}, "has 3 partitions, and the"),
    ],
)
def test_a_plan_for_what_is_no_trace_of_it(tmp_path: Path, trace: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_of(tmp_path, trace)
    assert not (tmp_path / "trace-planned.json").exists()


@pytest.mark.exhaustive
def test_clocks_that_drift_apart(tmp_path: Path) -> None:
    trace = traced(tmp_path, "backend=data_parallel", "trainer.profile.steps=5-40", FAST="1.2")
    assert len(spans(trace, "gradients", 0)) == 36
    check_that_they_meet(trace, "gradients")


def test_a_slow_barrier_does_not_count_where_clocks_drift_apart() -> None:
    first = [(0.0, 0.02), (0.021, 0.02101), (0.022, 0.042)]
    second = [(1000 + 1.2 * entered, 1000 + 1.2 * left) for entered, left in first]
    world: Any = SimpleNamespace(
        rank=1, barrier=lambda what: None, allgather=lambda rounds, what: [first, second]
    )
    found = clock_offset(world)
    assert found.error < 2e-5
    now = (found.moment - 1000) / 1.2
    assert now == pytest.approx(found.moment + found.seconds, rel=0, abs=found.error)


@pytest.mark.exhaustive
def test_ranks_that_change_have_the_clocks_of_their_new_numbers(tmp_path: Path) -> None:
    launch, faults = ("-n", "3", "--heal"), {"KILL": "22", "AHEAD": "2"}
    words = ("backend=data_parallel", "trainer.profile.steps=21-25")
    trace = traced(tmp_path, *words, launch=launch, **faults)
    lanes = [spans(trace, "steps", rank) for rank in range(3)]
    assert lanes[2] == []
    assert [name for name, _, _ in lanes[0]] == [name for name, _, _ in lanes[1]]
    assert lanes[0][-1][0] == "step 25"
    assert lanes[0][0][0] in ("step 22", "step 23")
    check_that_they_meet(trace, "steps")


def dict_of(found: list[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (begin, end) for name, begin, end in found}


def test_tensorflows_operations(tmp_path: Path) -> None:
    trace = json.loads(train(tmp_path, steps="3-4", tensorflow=True).read_text())
    lanes = {e["cat"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert any(lane.startswith("TensorFlow: ") for lane in lanes), lanes
    steps = spans(trace, "steps", 0)
    inside = [
        event
        for event in trace["traceEvents"]
        if event.get("cat", "").startswith("TensorFlow: ")
        and steps[0][1] - 1e3 < event["ts"] < steps[-1][2] + 1e3
    ]
    assert len(inside) > 10  # their clock is the same
    assert list((tmp_path / "run" / "tensorflow-profile").rglob("*.xplane.pb"))


def test_a_profiler_that_fails_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorflow-profile").write_text("no folder")
    with pytest.warns(UserWarning, match="the trace lacks TensorFlow's operations"):
        trace = json.loads(train(tmp_path, steps="3-4", tensorflow=True).read_text())
    assert [name for name, _, _ in spans(trace, "steps", 0)] == ["step 3", "step 4"]


def test_a_profiler_that_another_callback_has_ended(tmp_path: Path) -> None:
    class Ends(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 3:
                tf.profiler.experimental.stop()

    with pytest.warns(UserWarning, match="the trace lacks TensorFlow's operations"):
        trace = train(tmp_path, callbacks=[Ends()], steps="3-4", tensorflow=True)
    assert trace.exists()


def test_a_training_that_ends_early(tmp_path: Path) -> None:
    trace = json.loads(train(tmp_path, steps="7-99").read_text())
    assert [name for name, _, _ in spans(trace, "steps", 0)] == ["step 7", "step 8"]
    assert not trace_spans.is_tracing()


def test_one_that_ends_before_and_one_without(tmp_path: Path) -> None:
    said = "no trace of trainer.profile.steps=50-60 is written: training has ended after 8 updates"
    with pytest.warns(UserWarning, match=said):
        assert not train(tmp_path, steps="50-60").exists()
    assert not train(tmp_path).exists()
    tried = train(tmp_path / "tried", more={"trainer": {"fast_dev_run": 2}}, steps="1")
    assert not tried.parent.exists()


def test_one_that_has_resumed_beyond(tmp_path: Path) -> None:
    words = {"checkpoint": {"every": "8ba", "resume": "auto"}}
    trace = train(tmp_path, more=words, steps="3")
    before = trace.read_bytes()
    train(tmp_path, epochs=2, more=words, steps="3")  # an earlier start has traced it
    assert trace.read_bytes() == before
    with pytest.warns(UserWarning, match="steps=4-5 is written: training has resumed after them"):
        train(tmp_path, epochs=3, more=words, steps="4-5")
    assert trace.read_bytes() == before


def test_a_range_across_epochs_and_fits(tmp_path: Path) -> None:
    trace = json.loads(train(tmp_path, epochs=2, fits=2, steps="7-10").read_text())
    second = json.loads((tmp_path / "run" / "trace-2.json").read_text())
    for each in (trace, second):
        names = [name for name, _, _ in spans(each, "steps", 0)]
        assert names == ["step 7", "step 8", "step 9", "step 10"]


def test_a_fit_of_a_callback_leaves_the_trace_alone(tmp_path: Path) -> None:
    class Inner(Callback):
        def on_step_end(self, step: int, logs: Any = None) -> None:
            if step == 4 and not self.train_state.inside:
                x = np.ones((8, 4), np.float32)
                self.trainer.fit(self.model, x, x[:, :1], batch_size=2, epochs=2)

    trace = json.loads(train(tmp_path, callbacks=[Inner()], steps="3-5").read_text())
    assert [n for n, _, _ in spans(trace, "steps", 0)] == ["step 3", "step 4", "step 5"]
    assert sum(name == "compute" for name, _, _ in spans(trace, "loop", 0)) > 8
    assert not list((tmp_path / "run").glob("trace-*"))


def test_a_call_of_several_updates_is_one_span(tmp_path: Path) -> None:
    words = {"trainer": {"steps_per_call": 3}}
    trace = json.loads(train(tmp_path, epochs=2, more=words, steps="5-9").read_text())
    names = [name for name, _, _ in spans(trace, "steps", 0)]
    assert names == ["steps 4-6", "steps 7-8", "steps 9-11"]


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "run" / "trace.json").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"the trace .*trace\.json cannot be written"):
        train(tmp_path, steps="3")


def test_updates_are_grouped_outside_of_the_traced_ones() -> None:
    profile, seen = Profile(50, 60), []
    for step in (0, 48, 49, 55, 59, 60):
        profile.progress.step = step
        seen.append(profile.max_updates_per_call())
    assert seen == [49, 1, 1, 1, 1, None]


@pytest.mark.parametrize("steps", ["0-3", "5-4", "a", "1-", "-3", "1.5"])
def test_steps_that_are_none(steps: str) -> None:
    with pytest.raises(ConfigError, match="FIRST-LAST, counted from 1"):
        load_config({"trainer": {"profile": {"steps": steps}}})


def test_one_step_is_a_number() -> None:
    assert load_config(None, ["trainer.profile.steps=50"]).trainer.profile.span == (50, 50)
