"""Whether a schedule does all the work, once, in the right place, in an order that ends."""

from __future__ import annotations

from collections import defaultdict

from ktrainer.backends.pipeline.actions import Action, Schedule, ScheduleError
from ktrainer.backends.pipeline.simulate import simulate

_BACKWARD = ({"B"}, {"I", "W"})


def validate(schedule: Schedule) -> None:
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
    simulate(schedule)


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
    """What is wrong with the actions of one stage on one microbatch, in their order."""
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
