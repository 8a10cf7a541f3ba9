"""What a rank tells the launcher while its script runs; without a launcher nobody hears it.

Imports only the standard library: the launcher's worker sets `listener` before the script begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Listener(Protocol):
    """Passes on an event and what belongs to it: fields of `ktrainer.launch.channel.Note`."""

    def __call__(self, event: str, **fields: object) -> None: ...


listener: Listener | None = None


def tell_part(number: int, slots: Iterable[int]) -> None:
    """A part of the script begins in which deaths are healed, or in which they are not.

    Args:
        number: 0 is the part before the first one that heals, odd ones heal, even ones do not.
        slots: the processes that are in it, as far as this one knows.
    """
    _tell("part", number=number, slots=sorted(slots))


def tell_opening(seconds: float) -> None:
    """This process has come to where the world is opened, and waits for the others so long."""
    _tell("opening", seconds=seconds)


def tell_grace(seconds: float) -> None:
    """How long this process may need to end in once it is asked to."""
    _tell("grace", seconds=seconds)


def heard() -> bool:
    """Whether there is a launcher that listens."""
    return listener is not None


def _tell(event: str, **fields: object) -> None:
    if listener is not None:
        listener(event, **fields)
