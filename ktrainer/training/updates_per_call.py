"""The number of updates that one call of the compiled step makes: `trainer.steps_per_call`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.data import LocalBatch

CALL_SECONDS = 0.05  # as long may a signal wait, and the display
MOST_UPDATES = 64  # more are hardly faster, and their batches are in memory together
MOST_BYTES = 2**26  # of the batches of a call
FIRST_UPDATES = 100  # in a shorter training, compiling the loop takes longer than it saves

STEP_EVENTS = frozenset(
    (
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_batch_begin",
        "on_batch_end",
        "on_step_begin",
        "on_step_end",
        "on_step_checkpoint",
    )
)


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
        self.accumulate, self._setting = accumulate, setting
        self._chooses = setting == "auto"
        self._groups: Callable[[], bool] | None = groups
        self._updates = 0  # made so far
        self._seconds = CALL_SECONDS  # of an update of the last call, with the wait for data
        self._began = 0.0
        self._alone, self._grouped = _Pace(skipped=10), _Pace(skipped=1)
        self._compared = False
        self._error: BaseException | None = None
        self._unused = 0

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

        Raises:
            ConfigError: training goes on, though it was stopped in a call that had read ahead.
        """
        self._began = time.perf_counter()
        self._check_all_used()
        most = self._choose(until_due) if self._chooses else self._fixed
        most = most if left is None else min(most, left)
        updates: list[list[LocalBatch]] = []
        while len(updates) < most and not (self._chooses and updates and self._is_late()):
            update = self._next(batches, bool(updates))
            if not update:
                break
            updates.append(update)
            if self._chooses and len(updates) == 1 and most > 1:
                most = min(most, max(1, MOST_BYTES // max(1, _bytes_of(update))))
        return updates

    def end_call(self, updates: list[list[LocalBatch]], made: int) -> list[list[LocalBatch]]:
        """Note that a call is over; returns the updates that it made, the first ones."""
        seconds = time.perf_counter() - self._began
        (self._alone if made == 1 else self._grouped).add(seconds, made)
        self._seconds, self._unused = seconds / made, len(updates) - made
        self._updates += made
        return updates[:made]

    @property
    def _fixed(self) -> int:
        return self._setting if isinstance(self._setting, int) else 1

    def _next(self, batches: Iterator[LocalBatch], others: bool) -> list[LocalBatch]:
        """The local batches of one update; none at the end of the data.

        What ends the wait for them, an error of the data or a signal, is raised in the next call
        if there are `others`, whose updates come first.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        try:
            return list(islice(batches, self.accumulate))
        except BaseException as error:
            if not others:
                raise
            self._error = error
            return []

    def _choose(self, until_due: Callable[[], int | None]) -> int:
        most = min(MOST_UPDATES, int(CALL_SECONDS / self._seconds))
        if most <= 1 or self._updates < FIRST_UPDATES:
            return 1
        if self._groups is not None:
            self._chooses, self._groups = self._groups(), None
        if not self._compared and self._grouped.updates >= FIRST_UPDATES:
            # Slower where a step takes less than its data, which is no longer made meanwhile.
            self._compared, self._chooses = True, self._grouped.mean < self._alone.mean
        if not self._chooses:
            return 1
        due = until_due()
        return most if due is None else max(1, min(most, due))

    def _is_late(self) -> bool:
        return time.perf_counter() - self._began > CALL_SECONDS

    def _check_all_used(self) -> None:
        if self._unused:
            raise ConfigError(
                "training was stopped by a loss that is not finite, and a callback has set "
                f"model.stop_training to False; by then {self._unused} more batches were read for "
                "the same call. Set trainer.steps_per_call=1, or health.nan=ignore.",
                path="trainer.steps_per_call",
                value=self._setting,
            )


@dataclass
class _Pace:
    """Seconds of updates; of calls after the first `skipped`, which compile and fill caches."""

    skipped: int
    updates: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, updates: int) -> None:
        if self.skipped:
            self.skipped -= 1
        else:
            self.seconds, self.updates = self.seconds + seconds, self.updates + updates

    @property
    def mean(self) -> float:
        return self.seconds / self.updates if self.updates else math.inf


def _bytes_of(update: list[LocalBatch]) -> int:
    leaves = [leaf for part in update for leaf in tf.nest.flatten(part.batch)]
    dense = [leaf for leaf in leaves if isinstance(leaf, (np.ndarray, tf.Tensor))]
    return sum(int(np.prod(leaf.shape)) * tf.as_dtype(leaf.dtype).size for leaf in dense)


def updates_until_due(callback: Any) -> int | None:
    """The updates after which `callback` must hear of one; None: of none in particular.

    A method of that name says it, which a Keras callback may have, too. A callback that overrides
    an event of batches or steps must hear of each, unless its class has the method as well.
    """
    if not STEP_EVENTS.isdisjoint(vars(callback)):  # as of Keras' LambdaCallback
        return 1
    kind = type(callback)
    if kind.__module__.startswith("keras.") and getattr(callback, "save_freq", None) == "epoch":
        return None  # Keras' own that save do nothing in batches unless they count them
    if _overrides_step_events(kind):  # type: ignore[arg-type]
        return 1
    method = getattr(callback, "updates_until_due", None)
    return None if method is None else method()


@lru_cache(maxsize=1024)
def _overrides_step_events(kind: type) -> bool:
    """Whether a class does, or one of its bases before the first that says what it must hear of."""
    for base in kind.__mro__:
        if base is keras.callbacks.Callback or "updates_until_due" in vars(base):
            return False
        if not STEP_EVENTS.isdisjoint(vars(base)):
            return True
    return False
