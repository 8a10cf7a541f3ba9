"""How a task ended on one rank, and the errors that a test sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """How a task ended on one rank.

    Attributes:
        value: what the function returned.
        error: the exception it raised, or a `RuntimeError` naming it when it does not pickle.
        traceback: the text of its traceback on that rank; empty when it returned.
        seconds: how long it ran there.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0


class RankError(AssertionError):
    """A task raised on at least one rank; the message holds every rank's traceback.

    Attributes:
        outcomes: how the task ended on each rank.
        errors: rank -> exception, of the ranks that raised.
    """

    def __init__(self, task: str, outcomes: Sequence[Outcome], output: str = "") -> None:
        self.outcomes = list(outcomes)
        self.errors = {o.rank: o.error for o in outcomes if o.error is not None}
        parts = [f"{task} raised on rank(s) {', '.join(map(str, self.errors))} of {len(outcomes)}"]
        parts += [f"--- rank {o.rank}\n{o.traceback.rstrip()}" for o in outcomes if o.traceback]
        if output.strip():
            parts.append(f"--- output of all ranks\n{output.rstrip()}")
        super().__init__("\n".join(parts))


class RanksTimeout(AssertionError):
    """Ranks did not finish within the deadline; the message says where each one stood."""


class RankLost(AssertionError):
    """A rank was lost in the middle of a task."""
