"""Pipeline schedules by name, and their checks: pure data.

Nothing here knows of models, processes or TensorFlow. A new schedule is one function in
`schedule_functions` and one line in `SCHEDULES`.

    >>> print(schedule_text(make_schedule("1f1b", ranks=2, microbatches=3)))
    rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
    rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
    bubble 25.0%, 12 ticks, live activations 2 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ktrainer.backends.pipeline.schedules import schedule_functions
from ktrainer.backends.pipeline.schedules.actions import Action, Rows, Schedule, ScheduleError
from ktrainer.backends.pipeline.schedules.schedule_functions import Shape
from ktrainer.backends.pipeline.schedules.timeline import make_timeline
from ktrainer.errors import ConfigError

SCHEDULES: dict[str, Callable[[Shape], Rows]] = {
    "gpipe": schedule_functions.gpipe,
    "1f1b": schedule_functions.one_forward_one_backward,
    "interleaved": schedule_functions.interleaved,
    "zero_bubble": schedule_functions.zero_bubble,
    "forward_only": schedule_functions.forward_only,
}

# SageMaker's names, which users' scripts bring.
ALIASES = {"simple": "gpipe", "_only_forward": "forward_only"}


_BACKWARD = ({"B"}, {"I", "W"})


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    active_microbatches: int | None = None,
) -> Schedule:
    """Make the schedule of one update, checked by `validate_schedule`.

    Args:
        name: one of `SCHEDULES`, or of `ALIASES`.
        ranks: processes in the pipeline.
        microbatches: parts that a batch is cut into, or all batches of an update. Fewer than
            `ranks`, and numbers that are no multiple of it, are fine everywhere.
        chunks: stages on each rank; stage s is on rank s modulo `ranks`.
        active_microbatches: the most microbatches in flight on a rank: run forward there, and
            not yet backward. None: as many as the schedule takes.

    Raises:
        ConfigError: an unknown name, a number below one, a cap that the schedule cannot keep
            (with the least that it can), or several chunks where it has one.
    """
    known = [*SCHEDULES, *ALIASES]
    full = ALIASES.get(name, name)
    if full not in SCHEDULES:
        message = f"{name!r} is no schedule; there are {', '.join(SCHEDULES)}."
        raise ConfigError(message, path="backend.schedule", value=name, known=known)
    _at_least_one("partitions", ranks)
    _at_least_one("microbatches", microbatches)
    _at_least_one("chunks", chunks)
    if active_microbatches is not None:
        _at_least_one("active_microbatches", active_microbatches)
    rows = SCHEDULES[full](Shape(ranks, microbatches, chunks, active_microbatches))
    schedule = Schedule(full, ranks, microbatches, chunks, rows)
    validate_schedule(schedule)
    return schedule


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        message = f"it must be 1 or more, not {value}."
        raise ConfigError(message, path=f"backend.{key}", value=value)


def validate_schedule(schedule: Schedule) -> None:
    """Check a schedule, made here or by hand.

    Each stage runs each microbatch forward exactly once and, in a schedule that trains,
    backward exactly once after that: as one B, or as one I with one W after it. Each action is
    on its stage's rank, and no rank waits forever.

    Raises:
        ScheduleError: naming the rank and the action at fault.
    """
    if len(schedule.actions) != schedule.ranks:
        raise ScheduleError(
            f"the schedule {schedule.name!r} has rows for {len(schedule.actions)} ranks, "
            f"not for {schedule.ranks}."
        )
    for rank in range(schedule.ranks):
        _check_rank(schedule, rank)
    make_timeline(schedule)


def _check_rank(schedule: Schedule, rank: int) -> None:
    where = f"the schedule {schedule.name!r}, rank {rank}"
    found: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in schedule.actions[rank]:
        inside = action.stage in range(schedule.stages)
        if not inside or action.microbatch not in range(schedule.microbatches):
            raise ScheduleError(
                f"{where}: {action} is outside of {schedule.stages} stages and "
                f"{schedule.microbatches} microbatches."
            )
        if schedule.rank_of(action.stage) != rank:
            other = schedule.rank_of(action.stage)
            raise ScheduleError(f"{where}: {action} belongs on rank {other}, with its stage.")
        found[action.stage, action.microbatch].append(action)
    for stage in range(rank, schedule.stages, schedule.ranks):
        for microbatch in range(schedule.microbatches):
            problem = _problem(found[stage, microbatch], schedule.trains)
            if problem:
                name = f"stage {stage}, microbatch {microbatch}"
                raise ScheduleError(f"{where}: {name} {problem}.")


def _problem(actions: list[Action], trains: bool) -> str | None:
    """Describe what is wrong with the actions of one stage on one microbatch, in order."""
    kinds = [action.kind for action in actions]
    for action in actions:
        if kinds.count(action.kind) > 1:
            return f"runs {action} {kinds.count(action.kind)} times, not once"
    if "F" not in kinds:
        return "is never run forward (F)"
    backward = [kind for kind in kinds if kind != "F"]
    if trains and set(backward) not in _BACKWARD:
        have = " and ".join(backward) or "nothing"
        return f"needs one B, or one I and one W, to run backward, and has {have}"
    if kinds[0] != "F" or backward == ["W", "I"]:
        return f"runs in the order {' '.join(kinds)}: F must come before B or I, and I before W"
    return None
