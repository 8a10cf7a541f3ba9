"""Pipeline schedules by name: what each rank runs, in order, as pure data.

Nothing here knows of models, processes or TensorFlow. A new schedule is one function in
`generators` and one line in `SCHEDULES`.

    >>> print(make_schedule("1f1b", ranks=2, microbatches=3))
    rank 0  F0 F1 .  .  B0 -- F2 B1 -- .  B2 --
    rank 1  .  F0 B0 -- F1 B1 -- F2 B2 -- .  .
    bubble 25.0%, 12 ticks, live activations 2 1
"""

from __future__ import annotations

from collections.abc import Callable

from ktrainer.backends.pipeline import generators
from ktrainer.backends.pipeline.actions import (
    Action,
    Kind,
    Rows,
    Schedule,
    ScheduleError,
    live_activations,
    microbatches_in_flight,
)
from ktrainer.backends.pipeline.generators import Shape
from ktrainer.backends.pipeline.validate import validate
from ktrainer.errors import ConfigError

__all__ = [
    "ALIASES",
    "SCHEDULES",
    "Action",
    "Kind",
    "Schedule",
    "ScheduleError",
    "live_activations",
    "make_schedule",
    "microbatches_in_flight",
    "validate",
]

SCHEDULES: dict[str, Callable[[Shape], Rows]] = {
    "gpipe": generators.gpipe,
    "1f1b": generators.one_forward_one_backward,
    "interleaved": generators.interleaved,
    "zero_bubble": generators.zero_bubble,
    "forward_only": generators.forward_only,
}

# SageMaker's names, which users' scripts bring.
ALIASES = {"simple": "gpipe", "_only_forward": "forward_only"}


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    active_microbatches: int | None = None,
) -> Schedule:
    """What each rank runs, in order, for one update; checked by `validate`.

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
    validate(schedule)
    return schedule


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        message = f"it must be 1 or more, not {value}."
        raise ConfigError(message, path=f"backend.{key}", value=value)
