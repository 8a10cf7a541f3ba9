"""Spans of time of this process, while steps are profiled: `trainer.profile`.

Whatever may be slow reports its spans here: shares of the loop's time, collectives of gradients,
actions of a pipeline. Nothing is kept unless `start` was called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The lanes of a trace; a span of `STEPS` is a call of the program.
STEPS, LOOP, COLLECTIVES = "steps", "loop", "gradients"
STAGES, MESSAGES = "pipeline", "messages"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        lane: where it happened; spans of one lane follow or contain one another.
        name: what it was.
        begin, end: by `time.perf_counter`.
    """

    lane: str
    name: str
    begin: float
    end: float


_spans: list[Span] | None = None


def start() -> None:
    """Keep spans from now on."""
    global _spans
    _spans = []


def stop() -> list[Span]:
    """Keep no more spans; return those since `start`."""
    global _spans
    found, _spans = _spans or [], None
    return found


def is_tracing() -> bool:
    """Whether spans are kept."""
    return _spans is not None


def is_in_step(span: Mapping[str, Any], step: Mapping[str, Any]) -> bool:
    """Whether a span of a written trace began during one of `STEPS` of the same rank."""
    return bool(step["ts"] <= span["ts"] <= step["ts"] + step["dur"])


def add_span(lane: str, name: str, begin: float, end: float) -> None:
    """Keep a span, if spans are kept. Any thread may call it."""
    if (spans := _spans) is not None:
        spans.append(Span(lane, name, begin, end))
