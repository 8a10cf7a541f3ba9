"""The measured schedule of a pipeline, from the trace in a run's folder, for its report.

The trace is that of `trainer.profile.steps`, as `ktrainer.callbacks.profile` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktrainer.runs.run_curves import is_number
from ktrainer.runs.run_record import RunRecord
from ktrainer.state.trace_spans import MESSAGES, STAGES, STEPS, is_in_step

MOST_STEPS = 8  # that are drawn: the last ones
MOST_SPANS = 20_000  # of all of these
_LARGEST = 200 * 2**20  # bytes of a trace that is read
_TRACE = re.compile(r"trace(-\d+)?(-inside-\d+)?\.json")
_ACTION = re.compile(r"(\d*)([FBIW])\d+")
_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_HOW = "trainer.profile.steps=50-60 records it for these steps"

Lane = dict[str, Any]  # `name`, and `spans`: kind, label, begin and length in seconds


@dataclass
class MeasuredSchedule:
    """The schedule of a run.

    Attributes:
        steps: each with `label` and `lanes`.
        note: why there are none, or not all; empty: there is nothing to say.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def measured_schedule(record: RunRecord) -> MeasuredSchedule | None:
    """The schedule of the newest trace of a run; None: the run is no pipeline."""
    if not any(_backend(start) == "pipeline" for start in record.starts):
        return None
    try:
        path = _newest_trace(record.folder)
    except OSError:
        path = None
    if path is None:
        return MeasuredSchedule(note=f"It was not measured: {_HOW}.")
    try:
        if path.stat().st_size > _LARGEST:
            return MeasuredSchedule(note=f"{path.name} is too large to be drawn here.")
        found = _read(json.loads(path.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return MeasuredSchedule(note=f"{path.name} cannot be read: {type(error).__name__}.")
    if found.steps or found.note:
        return found
    return MeasuredSchedule(note=f"{path.name} has no actions of a pipeline: {_HOW}.")


def _backend(start: Mapping[str, Any]) -> Any:
    backend = start.get("settings", {}).get("backend")
    return backend.get("name") if isinstance(backend, dict) else None


def _newest_trace(folder: Path) -> Path | None:
    found = [path for path in folder.iterdir() if _TRACE.fullmatch(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _read(trace: Mapping[str, Any]) -> MeasuredSchedule:
    partitions = trace["otherData"]["partitions"]
    wanted = (STEPS, STAGES, MESSAGES)
    spans = [e for e in trace["traceEvents"] if e.get("cat") in wanted and _is_span(e)]
    steps: dict[str, dict[int, Any]] = {}
    for span in spans:
        if span["cat"] == STEPS:
            steps.setdefault(str(span["name"]), {})[span["pid"]] = span
    inner = [span for span in spans if span["cat"] != STEPS]
    if not (acted := [span["ts"] for span in inner if span["cat"] == STAGES]):
        return MeasuredSchedule()
    first, last = min(acted), max(acted)
    kept: list[dict[str, Any]] = []
    room = MOST_SPANS
    for name in reversed(steps):
        if not any(s["ts"] <= last and first <= s["ts"] + s["dur"] for s in steps[name].values()):
            continue
        step = _drawn_step(name, steps[name], inner, partitions)
        room -= sum(len(lane["spans"]) for lane in step["lanes"])
        if room < 0 or len(kept) == MOST_STEPS:
            break
        kept = [step, *kept] if step["lanes"] else kept
    if not kept and room < 0:
        return MeasuredSchedule(note=f"The last step has over {MOST_SPANS:,} actions and messages.")
    note = f"Of {len(steps)} traced steps, {len(kept)} can be shown here."
    return MeasuredSchedule(kept, note if 0 < len(kept) < len(steps) else "")


def _is_span(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event.get("dur"))
    return (
        event.get("ph") == "X" and isinstance(event.get("pid"), int) and all(map(is_number, times))
    )


def _drawn_step(
    name: str, steps: Mapping[int, Any], spans: Iterable[Any], partitions: list[Any]
) -> dict[str, Any]:
    """The actions of all ranks in a step, in seconds from its first one."""
    mine: dict[int, list[Any]] = {}
    for span in spans:
        step = steps.get(span["pid"])
        if step is not None and is_in_step(span, step):
            mine.setdefault(span["pid"], []).append(span)
    acts = {rank for rank, own in mine.items() if any(s["cat"] == STAGES for s in own)}
    origin = min((s["ts"] for rank in acts for s in mine[rank]), default=0.0)
    lanes = [
        {"name": _lane_name(rank, mine[rank], partitions), "spans": _drawn(mine[rank], origin)}
        for rank in sorted(acts, key=lambda rank: (partitions[rank], rank))
    ]
    return {"label": name, "lanes": lanes}


def _lane_name(rank: int, spans: Iterable[Any], partitions: list[Any]) -> str:
    found = (_ACTION.fullmatch(str(span["name"])) for span in spans if span["cat"] == STAGES)
    several = any(action is not None and action[1] for action in found)  # stages on a rank
    name = f"{'partition' if several else 'stage'} {partitions[rank]}"
    return f"{name}, rank {rank}" if partitions.count(partitions[rank]) > 1 else name


def _drawn(spans: Iterable[Any], origin: float) -> list[list[Any]]:
    """Kind, label, begin and length of each, waits last: they are drawn over actions."""
    found = []
    for span in sorted(spans, key=lambda span: (span["cat"] == MESSAGES, span["ts"])):
        action = _ACTION.fullmatch(str(span["name"]))
        kind = "waits" if span["cat"] == MESSAGES else _KINDS[action[2]] if action else "others"
        begin, length = (span["ts"] - origin) / 1e6, span["dur"] / 1e6
        found.append([kind, str(span["name"])[:80], float(f"{begin:.7g}"), float(f"{length:.4g}")])
    return found


def seconds_by_kind(lane: Lane) -> dict[str, float]:
    """Seconds of a lane's spans, by kind."""
    sums: dict[str, float] = {}
    for kind, _, _, length in lane["spans"]:
        sums[kind] = sums.get(kind, 0.0) + length
    return sums
