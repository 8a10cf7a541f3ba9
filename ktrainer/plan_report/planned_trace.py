"""The planned timeline of a pipeline beside the measured one, in a trace of `trainer.profile`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktrainer.backends.pipeline.schedules.timeline import Timeline
from ktrainer.errors import ConfigError, SetupError
from ktrainer.runtime.private_file import write_private
from ktrainer.state.trace_spans import STAGES, STEPS, is_in_step

LANE = "pipeline, as planned"
_SAME = "plan with the settings of the run."


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
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no trace of trainer.profile: {error!r}") from None
    if not planned:
        raise ConfigError(f"{path} has no steps of a pipeline: trace a run of backend=pipeline.")
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
    """The events to add to a trace; none if it has no steps, or is of no pipeline.

    Raises:
        ConfigError: its actions are not those of the plan.
    """
    _check_partitions(partitions, timeline)
    lane = max((event["tid"] for event in spans), default=0) + 1
    cut = [rank for rank, partition in enumerate(partitions) if partition is not None]
    if not cut:
        return []
    events: list[dict[str, Any]] = []
    for name in dict.fromkeys(event["name"] for event in spans if event["cat"] == STEPS):
        steps = {e["pid"]: e for e in spans if e["cat"] == STEPS and e["name"] == name}
        measured = [e for e in spans if e["cat"] == STAGES and is_in_step(e, steps[e["pid"]])]
        _check_actions(name, measured, partitions, timeline)
        begin = min(event["ts"] for event in measured)
        scale = (max(e["ts"] + e["dur"] for e in measured) - begin) / timeline.makespan
        for rank in cut:
            events += _of_rank(rank, lane, timeline, partitions[rank], begin, scale)
    heads = [
        {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": LANE}}
        for rank in cut
    ]
    return [*heads, *events] if events else []


def _of_rank(
    rank: int, lane: int, timeline: Timeline, partition: Any, begin: float, scale: float
) -> list[dict[str, Any]]:
    """The planned actions of a rank in one step, from `begin` on."""
    return [
        {
            "ph": "X",
            "pid": rank,
            "tid": lane,
            "cat": LANE,
            "name": timeline.schedule.label(span.action),
            "ts": round(begin + span.start * scale, 3),
            "dur": round((span.end - span.start) * scale, 3),
        }
        for span in timeline.spans[partition]
    ]


def _check_partitions(partitions: list[int | None], timeline: Timeline) -> None:
    """Refuse the trace of a pipeline with another number of partitions."""
    found = len({partition for partition in partitions if partition is not None})
    if found and found != len(timeline.spans):
        raise ConfigError(
            f"the trace has {found} partitions, and the plan {len(timeline.spans)}: {_SAME}"
        )


def _check_actions(
    name: str,
    measured: list[Mapping[str, Any]],
    partitions: list[int | None],
    timeline: Timeline,
) -> None:
    """Refuse a step whose actions are others than those of the plan, or in another order."""
    rows = [timeline.spans[p] if p is not None else () for p in partitions]
    expected = sum(map(len, rows))
    if len(measured) != expected:
        raise ConfigError(
            f"{name} of the trace has {len(measured)} actions, and the plan {expected}: {_SAME}"
        )
    for rank, row in enumerate(rows):
        own = sorted((e["ts"], e["name"]) for e in measured if e["pid"] == rank)
        found, planned = [n for _, n in own], [timeline.schedule.label(s.action) for s in row]
        if found != planned:
            raise ConfigError(
                f"{name} of the trace has the actions {' '.join(found)} on rank {rank}, and the "
                f"plan {' '.join(planned)}: {_SAME}"
            )
