"""Schedules to draw: every name, with the chunks and caps that it takes."""

from __future__ import annotations

from hypothesis import strategies as st

from ktrainer.backends.pipeline.schedule import SCHEDULES, Schedule, make_schedule

CHUNKED = ("gpipe", "interleaved", "forward_only")


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> tuple[Schedule, int]:
    """A schedule, and its cap; 0 for none."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    chunks = draw(st.integers(1, 3)) if name in CHUNKED else 1
    least = microbatches if name == "gpipe" else 1
    cap = draw(st.none() | st.integers(least, least + 8))
    return make_schedule(name, ranks, microbatches, chunks, cap), cap or 0
