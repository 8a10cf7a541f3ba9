"""Recovery from lost ranks: the protocol, and its default.

The loop tells a `Recovery` where an update begins, and commits after it; in between the ranks vote
on whether to stop. `ktrainer.elastic` has two that survive a lost rank:

    NoRecovery          a lost rank ends the run (here)
    ElasticRecovery     the surviving ranks resume from memory, and new ranks join
    JustInTimeRecovery  the surviving ranks of a replicated pipeline save a checkpoint, and end
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import keras
    import numpy as np

    from ktrainer.distributed import World
    from ktrainer.state.progress import Phase, Progress


class ResumableLoop(Protocol):
    """The loop of a run, as a Recovery drives it."""

    @property
    def steps_left(self) -> int | None:
        """Updates until `trainer.max_steps`; None without that limit."""

    def begin(self) -> None:
        """Do everything before the first update."""

    def updates(self) -> Generator[Any, Any, keras.callbacks.History]:
        """Yield all updates from the present progress to the end, for others to make."""

    def resume_at(self, phase: Phase, logs: Any, callbacks_up_to: tuple[int, int]) -> Progress:
        """Continue from a committed moment; returns the progress that callbacks know of."""


class Recovery(Protocol):
    """Keeps a run alive, or saves it, when ranks are lost."""

    def updates(self, loop: ResumableLoop) -> Generator[Any, Any, keras.callbacks.History]:
        """Yield all updates of `loop`, for others to make; errors of theirs are thrown in here."""

    def begin_step(self) -> None:
        """Prepare for an update that may be interrupted."""

    def commit(self, phase: Phase, logs: Any = None) -> None:
        """Make the present the moment that ranks can return to.

        Args:
            phase: how much of the last update is over.
            logs: of the last update; None: those of the commit before, which is of the same one.
        """

    def vote(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The maximum over ranks of each of `flags` (int32).

        Args:
            what: names the operation, should its deadline pass.
        """

    def close(self) -> None:
        """Let go of what was started for recovery."""


class NoRecovery:
    """A lost rank ends the run.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def updates(self, loop: ResumableLoop) -> Generator[Any, Any, keras.callbacks.History]:
        """Yield all updates of `loop`, for others to make."""
        loop.begin()
        return (yield from loop.updates())

    def begin_step(self) -> None:
        """Nothing is kept."""

    def commit(self, phase: Phase, logs: Any = None) -> None:
        """Nothing is kept."""

    def vote(self, flags: np.ndarray, what: str) -> np.ndarray:
        """The maximum over ranks of each of `flags`."""
        return self.world.oob_allreduce(flags, "max", what)

    def close(self) -> None:
        """Nothing is held."""
