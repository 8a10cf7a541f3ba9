"""The planned timeline of a pipeline beside the measured one, in a trace of `trainer.profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.backends.pipeline.schedules.timeline import Timeline
from ktrainer.errors import ConfigError, SetupError
from ktrainer.runtime.run_folder import write_private

LANE = "pipeline, as planned"
_MEASURED = "pipeline"  # ktrainer.state.trace_spans.STAGES


def add_plan(path: Path, timeline: Timeline) -> Path:
    """Write a copy of a trace that has the planned actions too, for each traced step.

    The plan knows what actions cost in proportion to each other. It begins with the step's first
    action of any rank and ends with its last one, so that what differs is where ranks wait.

    Returns:
        The copy: `trace-planned.json` beside `trace.json`.

    Raises:
        ConfigError: the file is no trace, or not of this schedule.
        SetupError: its folder cannot be written to.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        partitions = trace["otherData"]["partitions"]
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        planned = _planned(spans, partitions, timeline)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no trace of trainer.profile: {error!r}") from None
    trace["traceEvents"] += planned
    copy = path.with_name(f"{path.stem}-planned.json")
    try:
        write_private(copy, json.dumps(trace))
    except OSError as error:
        raise SetupError(f"{copy} cannot be written: {error.strerror}") from None
    return copy


def _planned(
    spans: list[Mapping[str, Any]], partitions: list[int | None], timeline: Timeline
) -> list[dict[str, Any]]:
    """The events to add to a trace."""
    lane = max((event["tid"] for event in spans), default=0) + 1
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": LANE}}
        for rank in range(len(partitions))
    ]
    for name in dict.fromkeys(event["name"] for event in spans if event["cat"] == "steps"):
        steps = {e["pid"]: e for e in spans if e["cat"] == "steps" and e["name"] == name}
        measured = [e for e in spans if e["cat"] == _MEASURED and _is_in(e, steps[e["pid"]])]
        expected = sum(len(timeline.spans[p]) for p in partitions if p is not None)
        if len(measured) != expected:
            raise ConfigError(
                f"{name} of the trace has {len(measured)} actions, and the plan {expected}: plan "
                "with the settings of the run."
            )
        begin = min(event["ts"] for event in measured)
        scale = (max(e["ts"] + e["dur"] for e in measured) - begin) / timeline.makespan
        for rank, partition in enumerate(partitions):
            for span in timeline.spans[partition] if partition is not None else ():
                where = {"ph": "X", "pid": rank, "tid": lane, "cat": LANE}
                times = {
                    "ts": round(begin + span.start * scale, 3),
                    "dur": round((span.end - span.start) * scale, 3),
                }
                label = timeline.schedule.label(span.action)
                events.append({**where, "name": label, **times})
    return events


def _is_in(event: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    return bool(step["ts"] <= event["ts"] <= step["ts"] + step["dur"])
