"""Abstract run in an experiment tracker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """All values of one step.

    Attributes:
        step: updates done.
        time: when they were logged, in seconds since 1970.
        values: by name: `train/`, `validation/` and `epoch/`, as in TensorBoard.
    """

    step: int
    time: float
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that a tracker shows besides its values.

    Attributes:
        token: identifies the run in the tracker, through restarts.
        name: for people, where the user gives none.
        folder: of the run.
        settings: the configuration, redacted.
        more: versions, commit, devices, ranks, digests of data and model.
        sent: the last step that may have been sent, as far as we know; -1: none.
        diff: what has changed in the working tree since the commit; empty if nothing has.
        secret_words: the command line holds a secret.
    """

    token: str
    name: str
    folder: Path
    settings: Mapping[str, Any]
    more: Mapping[str, Any]
    sent: int
    diff: str = ""
    secret_words: bool = False


class TrackerRun(ABC):
    """One run in a tracker, opened for the first time or again.

    Args:
        arguments: the user's, of the tracker's own `init`.
        facts: of the run.
    """

    @abstractmethod
    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None: ...

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that the library does not know. Raises ConfigError."""
        return

    @abstractmethod
    def held(self) -> int:
        """The last step of which the tracker has all values; -1 if it has none."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send the values of later steps, in order. A step that is sent again, because only some of
        its values had arrived, has each value once."""

    @abstractmethod
    def close(self, reason: str | None) -> None:
        """Wait until all is sent, and say how the run has ended: finished, interrupted or failed;
        None: its process has another run."""
