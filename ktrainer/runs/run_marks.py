"""Events of a run, by the clock: starts, ends, checkpoints, losses of ranks, warnings, and what
was slow; and those that are worth a look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ktrainer.errors import name_ranks
from ktrainer.runs.run_curves import is_number
from ktrainer.runs.run_differences import changes_on_resume
from ktrainer.runs.run_record import RunRecord, span
from ktrainer.runtime.history_file import RETURNS, Event, place

_DISTURBING = ("ranks", "rollback", "interrupted", "failed", "resume")
_SHOWN = 5  # of a kind of thing that stood out


@dataclass(frozen=True)
class Mark:
    """One thing that happened.

    Attributes:
        kind: start, resume, checkpoint, rollback, ranks, slow, warning, interrupted, failed or
            finished.
        text: what, for people.
        step: updates done then; None if unknown.
        time: seconds since 1970; None if unknown.
        fit: the call of `fit` that it is of.
    """

    kind: str
    text: str
    step: int | None
    time: float | None
    fit: tuple[int, int]


@dataclass(frozen=True)
class Span:
    """A time in which a run did one thing.

    Attributes:
        kind: training or healing.
        begin, end: seconds since 1970.
    """

    kind: str
    begin: float
    end: float


def run_marks(record: RunRecord) -> list[Mark]:
    """All that happened in the script's calls of `fit`, in order."""
    marks: list[Mark] = []
    start: Event | None = None  # the last one
    last: Event = {"event": ""}
    ended = False  # which a checkpoint may follow that was being written
    step = 0  # the last one that is known: a launcher writes none
    for event in record.outer:
        kind, step = event["event"], event.get("step", step)
        if kind == "start":
            if start is not None and not ended:
                marks.append(_killed(start, last))
            marks.append(_began(event, start))
            start = event
        elif kind in _TEXTS:
            text = _TEXTS[kind](event)
            marks.append(Mark(_kind(event), text, step, _time(event), place(event)))
        ended = kind == "end" or (ended and kind not in RETURNS)
        last = event
    state, why = record.state
    if start is not None and not ended and state != "running":
        marks.append(replace(_killed(start, last), text=why))
    return marks


def _kind(event: Event) -> str:
    kind = str(event["event"])
    return str(event["reason"]) if kind == "end" else kind


def _began(event: Event, before: Event | None) -> Mark:
    step, ranks = event["step"], event.get("ranks")
    processes = f" on {ranks} process{'' if ranks == 1 else 'es'}" if is_number(ranks) else ""
    if before is None:
        what = "training began"
    elif place(event) != place(before) and not step:
        what = f"fit {place(event)[0]} began"
    else:
        restart = event.get("restart")
        number = f" (restart {restart})" if is_number(restart) and restart else ""
        what = f"continued after step {step}{number}" if step else f"began again{number}"
    kind = "start" if before is None or place(event) != place(before) else "resume"
    return Mark(kind, what + processes, step, _time(event), place(event))


def _killed(start: Event, last: Event) -> Mark:
    text = "its process ended without a word"
    return Mark("interrupted", text, last.get("step"), _time(last), place(start))


def _of_end(event: Event) -> str:
    reason, why = str(event["reason"]), str(event.get("why", ""))
    if reason == "finished":
        return f"finished: {why}" if why else "finished"
    rank = f"rank {event['rank']}: " if "rank" in event and not why.startswith("rank ") else ""
    return f"{reason}: {rank}{why}" if why else reason


def _of_ranks(event: Event) -> str:
    lost, ranks, seconds = event.get("lost"), event.get("ranks"), event.get("seconds")
    lost = [rank for rank in lost if is_number(rank)] if isinstance(lost, list) else []
    were = "was" if len(lost) == 1 else "were"
    other = "no rank was lost" if event.get("joined") is False else "ranks joined"
    what = f"{name_ranks(lost)} {were} lost" if lost else other
    after = f" after step {event['step']}"
    count = f"; {ranks} continued" if is_number(ranks) else ""
    return what + after + count + (f" in {seconds:.2g} s" if is_number(seconds) else "")


def _of_checkpoint(event: Event) -> str:
    best = ", the best so far" if event.get("metric") else ""
    return f"checkpoint of step {event['step']}{best}"


def _of_warning(event: Event) -> str:
    where = f", {event['where']}" if event.get("where") else ""
    return f"warning on {_ranks_of(event)}{where}: {event['message']} ({event['kind']})"


def _ranks_of(*events: Event) -> str:
    """The ranks that had a warning."""
    return name_ranks(sorted({r for event in events for r in event["ranks"] if is_number(r)}))


_TEXTS: dict[str, Any] = {
    "checkpoint": _of_checkpoint,
    "rollback": lambda event: f"back to step {event['step']}",
    "ranks": _of_ranks,
    "slow": lambda event: str(event["message"]),
    "warning": _of_warning,
    "end": _of_end,
}


def _time(event: Event) -> float | None:
    value = event.get("time")
    return value if is_number(value) else None


def run_spans(record: RunRecord) -> list[Span]:
    """Times in which the run trained, and in which it was healed."""
    spans: list[Span] = []
    begun = alive = None
    for event in record.outer:
        now = _time(event)
        if now is None:
            continue
        if event["event"] == "start":
            spans += _training(begun, alive)
            begun = now
        alive = now
        if event["event"] == "end":
            spans += _training(begun, alive)
            begun = None
        if event["event"] == "ranks" and is_number(event.get("seconds")):
            spans.append(Span("healing", now - event["seconds"], now))
    running = begun is not None and record.state[0] == "running"
    return spans + _training(begun, max(alive or 0.0, record.last_sign) if running else alive)


def _training(begun: float | None, alive: float | None) -> list[Span]:
    """The time up to the last sign of life."""
    return [] if begun is None or alive is None else [Span("training", begun, alive)]


# -- what stood out


def stood_out(record: RunRecord) -> list[str]:
    """Lines about what is worth a look."""
    return [
        *_of_state(record),
        *_not_finite(record),
        *_most(mark.text for mark in run_marks(record) if mark.kind == "slow"),
        *_most(mark.text for mark in run_marks(record)[:-1] if mark.kind in _DISTURBING),
        *_warnings(record),
        *_most(
            f"resumed at step {each['step']} with another {each['name']}: "
            f"{each['before']}, then {each['after']}"
            for each in changes_on_resume(record)
        ),
        *_of_code(record),
    ]


def _of_state(record: RunRecord) -> list[str]:
    state, why = record.state
    if not why and state in ("finished", "running"):
        return []
    return [f"{state}: {why}" if why else state]


def _not_finite(record: RunRecord) -> Iterator[str]:
    """The first step at which each metric is no finite number."""
    seen: set[str] = set()
    for row in record.rows:
        for name, value in row["metrics"].items():
            if not math.isfinite(float(value)) and name not in seen:
                seen.add(name)
                if len(seen) <= _SHOWN:
                    yield f"{name} is {float(value)} at step {row['step']} (epoch {row['epoch']})"
    if len(seen) > _SHOWN:
        yield f"{len(seen) - _SHOWN} more metrics have values that are not finite"


def _most(lines: Any) -> list[str]:
    """Each line once, with how often it comes, up to some."""
    counts = Counter(lines)
    found = [f"{line} ({count} times)" if count > 1 else line for line, count in counts.items()]
    more = [f"and {len(found) - _SHOWN} more of these"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more


def _warnings(record: RunRecord) -> list[str]:
    """Each warning once, with all ranks that had it and the step at which it first came."""
    found: dict[tuple[str, str], list[Event]] = {}
    for event in record.outer:
        if event["event"] == "warning":
            found.setdefault((event["kind"], event["message"]), []).append(event)
    return _most(
        f"warning after step {events[0]['step']} on {_ranks_of(*events)}: {message} ({kind})"
        for (kind, message), events in found.items()
    )


def _of_code(record: RunRecord) -> list[str]:
    code = record.starts[-1].get("code") if record.starts else None
    if isinstance(code, dict) and code.get("changes"):
        return ["the script's working tree had changes that are not in its git commit"]
    return []


def seconds_of(spans: list[Span]) -> float:
    """Seconds of training in all."""
    return sum(each.end - each.begin for each in spans if each.kind == "training")


def duration_text(record: RunRecord) -> str:
    """`12 min`, or `12 min, of which 8 min training`."""
    spans = run_spans(record)
    if not spans:
        return ""
    whole = max(each.end for each in spans) - min(each.begin for each in spans)
    trained = seconds_of(spans)
    if whole - trained > max(1.0, 0.01 * whole):
        return f"{span(whole)}, of which {span(trained)} training"
    return span(whole)
