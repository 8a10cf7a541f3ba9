"""Events that a rank reports to the launcher while its script runs; dropped without a launcher.

Imports only the standard library: the launcher's worker sets `listener` before the script begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class EventListener(Protocol):
    """Forwards an event and its fields, those of `ktrainer.launch.rank_channel.Note`."""

    def __call__(self, event: str, **fields: object) -> None: ...


listener: EventListener | None = None


def report_phase(number: int, stable_ranks: Iterable[int]) -> None:
    """Report that a phase of the script begins in which lost ranks are healed, or are not.

    Args:
        number: 0 is the phase before the first one that heals, odd ones heal, even ones do not.
        stable_ranks: the ranks that are in it, as far as this one knows.
    """
    _report("phase", number=number, stable_ranks=sorted(stable_ranks))


def report_startup(seconds: float) -> None:
    """Report that this process opens the world, and waits so long for the others."""
    _report("startup", seconds=seconds)


def report_grace(seconds: float) -> None:
    """Report how long this process may take to end after it is asked to."""
    _report("grace", seconds=seconds)


def report_silent(stable_ranks: Iterable[int]) -> None:
    """Report ranks of other hosts that did not answer, for the launcher to kill them."""
    _report("silent", stable_ranks=sorted(stable_ranks))


def report_history(path: str) -> None:
    """Report the record of the run, in which the launcher writes how the ranks have ended."""
    _report("history", text=path)


def has_listener() -> bool:
    """Return whether a launcher receives events."""
    return listener is not None


def _report(event: str, **fields: object) -> None:
    if listener is not None:
        listener(event, **fields)
