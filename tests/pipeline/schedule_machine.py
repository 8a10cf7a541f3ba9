"""An independent machine for schedules: it passes messages and knows nothing of the simulator.

Every rank is a program of receive, compute and send steps, written here from what a pipeline is,
not from the library's own dependencies, and is run until it blocks.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import strategies as st

from ktrainer.backends.pipeline.schedules.actions import Action, Schedule
from ktrainer.backends.pipeline.schedules.make_schedule import SCHEDULES, make_schedule

CHUNKED = ("gpipe", "interleaved", "forward_only")


def rows(*texts: str) -> tuple[tuple[Action, ...], ...]:
    """Actions of each rank, from texts such as `"F0 F1 B0 B1"`, one stage a rank, or `"2F0"`."""
    return tuple(
        tuple(_action(word, rank) for word in text.split()) for rank, text in enumerate(texts)
    )


def _action(word: str, rank: int) -> Action:
    at = next(i for i, letter in enumerate(word) if letter in "FBIW")
    return Action(word[at], int(word[:at]) if at else rank, int(word[at + 1 :]))


def by_hand(*texts: str, microbatches: int, chunks: int = 1) -> Schedule:
    """A schedule that nothing has checked."""
    return Schedule("by hand", len(texts), microbatches, chunks, rows(*texts))


def program(schedule: Schedule, rank: int) -> list[tuple[str, Any, int]]:
    """("receive" or "send", tag, other rank), and ("run", action, own rank), in order."""
    last = schedule.ranks * schedule.chunks - 1
    steps: list[tuple[str, Any, int]] = []
    for action in schedule.actions[rank]:
        stage, microbatch = action.stage, action.microbatch
        up, down = (stage + 1) % schedule.ranks, (stage - 1) % schedule.ranks
        if action.kind == "F" and stage > 0:
            steps.append(("receive", ("F", stage - 1, microbatch), down))
        if action.kind in "BI" and stage < last:
            steps.append(("receive", ("B", stage + 1, microbatch), up))
        steps.append(("run", action, rank))
        if action.kind == "F" and stage < last:
            steps.append(("send", ("F", stage, microbatch), up))
        if action.kind in "BI" and stage > 0:
            steps.append(("send", ("B", stage, microbatch), down))
    return steps


def run(schedule: Schedule, *, tags: bool = True, buffered: bool = True) -> list[int]:
    """Run all programs; the steps that each rank has left when nothing moves: all 0 is success.

    Args:
        schedule: what to run.
        tags: whether a receive picks its message by tag; else it takes the oldest from its rank,
            and `AssertionError` is raised when that is the wrong one.
        buffered: whether a send returns at once; else it waits until its message is received.
    """
    programs = [deque(program(schedule, rank)) for rank in range(schedule.ranks)]
    mail: dict[tuple[int, int], list[Any]] = {}
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(programs):
            while steps and _step(rank, steps[0], mail, tags, buffered):
                steps.popleft()
                moved = True
    assert any(programs) or not any(mail.values()), f"never received: {mail}"
    return [len(steps) for steps in programs]


def _step(rank: int, step: tuple[str, Any, int], mail: dict, tags: bool, buffered: bool) -> bool:
    """Whether `rank` can take `step` now; if so, it has."""
    kind, what, other = step
    if kind == "run":
        return True
    if kind == "send":
        box, gone = mail.setdefault((rank, other), []), ("received", what)
        if buffered or other == rank:
            box.append(what)
            return True
        if gone in box:
            box.remove(gone)
            return True
        if what not in box:
            box.append(what)
        return False
    box = mail.setdefault((other, rank), [])
    waiting = [item for item in box if item[0] != "received"]
    if not (what in waiting if tags else waiting):
        return False
    # Between stages on one rank nothing is sent, so order says nothing there.
    assert tags or other == rank or waiting[0] == what, f"rank {rank} wants {what}: {waiting[0]}"
    box.remove(what)
    if not buffered and other != rank:
        box.append(("received", what))
    return True


@st.composite
def schedules(draw: st.DrawFn, names: tuple[str, ...] = tuple(SCHEDULES)) -> tuple[Schedule, int]:
    """A schedule, and its cap; 0 for none."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    chunks = draw(st.integers(1, 3)) if name in CHUNKED else 1
    least = microbatches if name == "gpipe" else 1
    cap = draw(st.none() | st.integers(least, least + 8))
    return make_schedule(name, ranks, microbatches, chunks, cap), cap or 0
