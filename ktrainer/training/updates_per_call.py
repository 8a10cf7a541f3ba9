"""The number of updates that one call of the compiled step makes: `trainer.steps_per_call`."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.callbacks.callback_list import handles
from ktrainer.data.prefetch_thread import check_wait
from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.data import LocalBatch

MAX_SECONDS = 0.05  # of a call: signals and the display wait as long
MAX_UPDATES = 64  # more are hardly faster
MAX_BYTES = 10 * 2**20  # of the batches of a call, which are copied together
FIRST_UPDATES = 100  # one by one: in a shorter training, compiling the loop does not pay
COMPARED_UPDATES = 30  # one by one, whenever compared again

TRAIN_BATCH_EVENTS = (
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_batch_begin",
    "on_batch_end",
)
STEP_EVENTS = frozenset((*TRAIN_BATCH_EVENTS, "on_step_begin", "on_step_end", "on_step_checkpoint"))


class UpdatesPerCall:
    """Takes from the data what each call of the program trains on.

    Args:
        setting: the number of the configuration, or `auto`.
        can_train_many: whether `auto` may be more than 1 for the program, which may have to compile
            its step to know: called once.
        accumulate: local batches an update.
    """

    def __init__(
        self,
        setting: int | Literal["auto"],
        can_train_many: Callable[[], bool],
        accumulate: int = 1,
    ) -> None:
        self.accumulate, self._setting = accumulate, setting
        self._auto = setting == "auto"
        self._can_train_many: Callable[[], bool] | None = can_train_many
        self._updates = 0  # made so far
        self._seconds = MAX_SECONDS  # an update in the last call, with the wait for data
        self._began = 0.0
        self._ended = 0.0  # the last call; 0: what followed is none of the next one's time
        self._limit: int | None = None  # of updates in the last call, for what was due after them
        self._start_comparison(FIRST_UPDATES)
        self._first_pass = True  # of the data, which may be cached in the next one
        self._error: BaseException | None = None  # of the data, for the next call
        self._unused_updates = 0  # of the last call

    def take(
        self,
        batches: Iterator[LocalBatch],
        steps_left: int | None,
        max_updates: Callable[[], int | None],
    ) -> list[list[LocalBatch]]:
        """The updates of the next call, each a list of local batches; empty at the end of these.

        Args:
            steps_left: updates until training ends; None for no limit.
            max_updates: the most for which callbacks, validation and logs can wait; None for no
                limit.

        Raises:
            ConfigError: training was resumed after a call that had stopped early.
        """
        self._began = time.perf_counter()
        self._check_all_used()
        most = self._auto_size(max_updates) if self._auto else self._fixed_size
        most = most if steps_left is None else min(most, steps_left)
        updates: list[list[LocalBatch]] = []
        while len(updates) < most and not (self._auto and updates and self._is_late()):
            update = self._next(batches, bool(updates))
            if not update:
                break
            updates.append(update)
            if self._auto and len(updates) == 1 and most > 1:
                most = min(most, max(1, MAX_BYTES // max(1, _bytes_of(update))))
        if not updates:
            self._ended = 0.0
            if self._first_pass and self._updates:  # an epoch that was resumed may have none left
                self._first_pass = False
                # Data may be cached from here on. Longer calls that were faster while it was slow
                # are so all the more when it is not.
                if not self._many_wins:
                    self._start_comparison(max(COMPARED_UPDATES, FIRST_UPDATES - self._updates))
        return updates

    def end_call(self, updates: list[list[LocalBatch]], made: int) -> list[list[LocalBatch]]:
        """Note that a call is over; returns the updates that it made, the first ones."""
        now = time.perf_counter()
        # With callbacks since the last call, which fewer calls save, too; but not with validation,
        # logs and checkpoints: they follow all long calls, which end there, and few short ones.
        (self._one if made == 1 else self._many).add(now - (self._ended or self._began), made)
        self._seconds, self._unused_updates = (now - self._began) / made, len(updates) - made
        self._ended = 0.0 if made == self._limit else now
        self._updates += made
        return updates[:made]

    def discard_pending(self) -> None:
        """Drop the last call's deferred error and count of unused batches: after a heal the data is
        read again from the commit."""
        self._error, self._unused_updates = None, 0

    @property
    def _fixed_size(self) -> int:
        return self._setting if isinstance(self._setting, int) else 1

    def _next(self, batches: Iterator[LocalBatch], defer_errors: bool) -> list[LocalBatch]:
        """The local batches of one update; none at the end of the data.

        Args:
            defer_errors: raise what ends the wait for them, an error of the data or a signal, in
                the next call: after the updates whose batches were taken already.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        try:
            check_wait()
            return list(islice(batches, self.accumulate))
        except BaseException as error:
            if not defer_errors:
                raise
            self._error = error
            return []

    def _auto_size(self, max_updates: Callable[[], int | None]) -> int:
        """The most updates of the next call; may find that `auto` is 1 from here on."""
        most = min(MAX_UPDATES, int(MAX_SECONDS / self._seconds))
        self._limit = None if most <= 1 or self._many_wins is False else max_updates()
        if most <= 1 or self._updates < FIRST_UPDATES:
            return 1
        if self._can_train_many is not None:
            self._auto, self._can_train_many = self._can_train_many(), None
        if not self._auto or not self._many_is_faster():
            return 1
        return most if self._limit is None else max(1, min(most, self._limit))

    def _start_comparison(self, single: int) -> None:
        """Measure so many single updates from here on, and then some in longer calls."""
        self._single_until = self._updates + single
        self._compare_again = math.inf  # updates from which on the two are compared again
        # The first calls of a kind compile and fill caches.
        self._one, self._many = _MedianSeconds(calls_to_skip=10), _MedianSeconds(calls_to_skip=1)
        self._many_wins: bool | None = None  # whether they are faster; None: not known yet

    def _many_is_faster(self) -> bool:
        """Whether calls of many updates are faster, or are still tried; they are slower where data
        takes longer than the step, as the two no longer overlap.

        Compared again each time the number of updates has tripled, as another program may have
        ended; and after the first pass over the data unless they have proved faster in it.
        """
        if self._updates >= self._compare_again:
            self._start_comparison(COMPARED_UPDATES)
        if self._updates < self._single_until:
            return False
        if self._many_wins is None and self._many.updates >= FIRST_UPDATES:
            self._many_wins = self._many.median < self._one.median
            self._compare_again = 3.0 * self._updates
        return self._many_wins is not False

    def _is_late(self) -> bool:
        return time.perf_counter() - self._began > MAX_SECONDS

    def _check_all_used(self) -> None:
        if self._unused_updates:
            raise ConfigError(
                "training was stopped by a loss that is not finite, and a callback has set "
                f"model.stop_training to False; by then {self._unused_updates} more batches were "
                "read for the same call. Set trainer.steps_per_call=1, or health.nan=ignore.",
                path="trainer.steps_per_call",
                value=self._setting,
            )


class _MedianSeconds:
    """The median seconds of an update, over the last calls: some wait for another program."""

    def __init__(self, calls_to_skip: int) -> None:
        self._calls_to_skip = calls_to_skip
        self._seconds: deque[float] = deque(maxlen=FIRST_UPDATES)
        self.updates = 0

    def add(self, seconds: float, updates: int) -> None:
        if self._calls_to_skip:
            self._calls_to_skip -= 1
            return
        self._seconds.append(seconds / updates)
        self.updates += updates

    @property
    def median(self) -> float:
        return statistics.median(self._seconds) if self._seconds else math.inf


def _bytes_of(update: list[LocalBatch]) -> int:
    leaves = [leaf for part in update for leaf in tf.nest.flatten(part.batch)]
    dense = [leaf for leaf in leaves if isinstance(leaf, (np.ndarray, tf.Tensor))]
    return sum(int(np.prod(leaf.shape)) * tf.as_dtype(leaf.dtype).size for leaf in dense)


def max_updates_per_call(callback: Any) -> int | None:
    """The most updates that one call may make before the callback's events of batches and steps
    are called; None: no limit.

    A method of that name returns it, which any callback may have. It is 1 where such an event is
    overridden by a class that the method's class does not derive from.
    """
    if _needs_single_updates(callback):
        return 1
    method = getattr(callback, "max_updates_per_call", None)
    return None if method is None else method()


def catches_up(callback: Any) -> bool:
    """Whether the batch events of a callback are called for each batch after a call of several:
    it has some, and a `max_updates_per_call` that covers them."""
    if not hasattr(callback, "max_updates_per_call") or _needs_single_updates(callback):
        return False
    return any(handles(callback, event) for event in TRAIN_BATCH_EVENTS)


def _needs_single_updates(callback: Any) -> bool:
    """Whether a callback has an event of batches or steps that its `max_updates_per_call` does not
    cover."""
    if not STEP_EVENTS.isdisjoint(vars(callback)):  # as of Keras' LambdaCallback
        return True
    kind = type(callback)
    if kind.__module__.startswith("keras.") and getattr(callback, "save_freq", None) == "epoch":
        return False  # Keras' own that save do nothing in batches unless they count them
    return _overrides_step_events(kind)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _overrides_step_events(kind: type) -> bool:
    """Whether a class overrides an event of batches or steps, or inherits one, that the class of
    its `max_updates_per_call` does not have."""
    limiting: type = next(
        (base for base in kind.__mro__ if "max_updates_per_call" in vars(base)),
        keras.callbacks.Callback,
    )
    others = [base for base in kind.__mro__ if not issubclass(limiting, base)]
    return any(not STEP_EVENTS.isdisjoint(vars(base)) for base in others)
