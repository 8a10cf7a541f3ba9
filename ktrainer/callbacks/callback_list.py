"""Keras' list of callbacks, with the time of each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
from keras.src.utils.python_utils import pythonify_logs

from ktrainer.callbacks.base import Callback, time_share
from ktrainer.state.train_state import TrainState

_BATCH_EVENTS = ("on_batch", "on_train_batch", "on_test_batch")
_DO_NOTHING = frozenset(
    getattr(base, f"{event}_{edge}")
    for base in (Callback, keras.callbacks.Callback)
    for event in _BATCH_EVENTS
    for edge in ("begin", "end")
)


class CallbackList(keras.callbacks.CallbackList):
    """Keras' list, which counts the time of each callback in `state.times`. Those that have no
    event of their own at a batch are not called there.

    Args:
        callbacks, settings: as for Keras' list.
        state: of the run.
    """

    def __init__(self, callbacks: Any = None, *, state: TrainState, **settings: Any) -> None:
        self._state = state
        super().__init__(callbacks, **settings)
        # Keras may hand events to a thread, where collectives of callbacks would lose their order.
        self._async_train = self._async_test = self._async_predict = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._call("on_train_begin", (), logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._call("on_train_end", (), logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._call("on_epoch_begin", (epoch,), logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._call("on_epoch_end", (epoch,), logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._call("on_test_begin", (), logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._call("on_test_end", (), logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._call_at_batch("on_train_batch_begin", "on_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._call_at_batch("on_train_batch_end", "on_batch_end", batch, logs)

    def catch_up(self, callbacks: Collection[Any], first: int, logs: Sequence[Any]) -> None:
        """Call the batch events that a call of several updates has left out: all between the begin
        of its first batch and the end of its last.

        Args:
            callbacks: those that get them.
            first: number of the first batch.
            logs: of each batch but the last.
        """
        for batch, each in enumerate(logs, start=first):
            self._call_at_batch("on_train_batch_end", "on_batch_end", batch, each, callbacks)
            self._call_at_batch(
                "on_train_batch_begin", "on_batch_begin", batch + 1, None, callbacks
            )

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._call_at_batch("on_test_batch_begin", "on_test_batch_begin", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._call_at_batch("on_test_batch_end", "on_test_batch_end", batch, logs)

    def _call(self, event: str, args: tuple[Any, ...], logs: Any) -> None:
        times, logs = self._state.times, pythonify_logs(logs)
        for callback in self.callbacks:
            with times.of(time_share(callback)):
                getattr(callback, event)(*args, logs)

    def _call_at_batch(
        self,
        event: str,
        older: str,
        batch: int,
        logs: Any,
        among: Collection[Any] | None = None,
    ) -> None:
        """Call `event` of the callbacks that have it, or the `older` one that Keras' own calls."""
        times, are_read = self._state.times, False
        for callback in self.callbacks if among is None else among:
            if not (handles(callback, event) or handles(callback, older)):
                continue
            if not are_read:  # which waits for the device that computes them
                with times.of("compute"):
                    logs, are_read = pythonify_logs(logs), True
            with times.of(time_share(callback)):
                getattr(callback, event)(batch, logs=logs)


def handles(callback: Any, event: str) -> bool:
    """Whether a callback has a batch event that does something: one of its class, of itself, as
    Keras' LambdaCallback has, or of an object that it passes events to."""
    method = getattr(callback, event, None)
    return getattr(method, "__func__", None) not in _DO_NOTHING
