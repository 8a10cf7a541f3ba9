"""The number of updates that one call of the compiled step makes: `trainer.steps_per_call`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from ktrainer.callbacks.base import hears_of_steps

if TYPE_CHECKING:
    from ktrainer.data import LocalBatch

CALL_SECONDS = 0.05  # as long may a signal wait, and the display
MOST_UPDATES = 64  # more are hardly faster, and their batches are in memory together
FIRST_UPDATES = 100  # in a shorter training, compiling the loop takes longer than it saves


class UpdatesPerCall:
    """Takes from the data what each call of the program trains on.

    Args:
        setting: the number of the configuration, or `auto`.
        groups: whether the program may make several updates in a call, else `auto` is 1; it may
            have to compile the step for that, and is asked once.
        accumulate: local batches an update.
    """

    def __init__(
        self, setting: int | Literal["auto"], groups: Callable[[], bool], accumulate: int = 1
    ) -> None:
        self.accumulate = accumulate
        self._setting = 1 if setting == "auto" else setting
        self._chooses = setting == "auto"
        self._groups: Callable[[], bool] | None = groups
        self._made = 0
        self._seconds = CALL_SECONDS  # of an update of the last call, with the wait for data
        self._began = 0.0
        self._returned: list[list[LocalBatch]] = []

    def take(
        self,
        batches: Iterator[LocalBatch],
        left: int | None,
        until_due: Callable[[], int | None],
    ) -> list[list[LocalBatch]]:
        """The updates of the next call, each a list of local batches; empty at the end of these.

        Args:
            left: updates until training ends; None for no limit.
            until_due: updates until something else must happen; None for no limit.
        """
        self._began = time.perf_counter()
        most = self._choose(until_due) if self._chooses else self._setting
        most = most if left is None else min(most, left)
        updates, self._returned = self._returned[:most], self._returned[most:]
        while len(updates) < most and not (self._chooses and updates and self._is_late()):
            update = list(islice(batches, self.accumulate))
            if not update:
                break
            updates.append(update)
        return updates

    def end_call(self, updates: list[list[LocalBatch]], made: int) -> list[list[LocalBatch]]:
        """Note that a call is over; returns the updates that it made. The others are the next."""
        self._returned = updates[made:] + self._returned
        self._seconds = (time.perf_counter() - self._began) / made
        self._made += made
        return updates[:made]

    def _choose(self, until_due: Callable[[], int | None]) -> int:
        most = min(MOST_UPDATES, int(CALL_SECONDS / self._seconds))
        if most <= 1 or self._made < FIRST_UPDATES:
            return 1
        if self._groups is not None:
            self._chooses, self._groups = self._groups(), None
        if not self._chooses:
            return 1
        due = until_due()
        return most if due is None else min(most, due)

    def _is_late(self) -> bool:
        return time.perf_counter() - self._began > CALL_SECONDS


def updates_until_due(callback: Any) -> int | None:
    """The updates after which `callback` must hear of one; None: of none in particular."""
    own = getattr(callback, "updates_until_due", None)  # a Keras callback may have one, too
    if own is not None:
        return own()
    return 1 if hears_of_steps(callback) else None
