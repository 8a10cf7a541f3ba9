"""The base class of callbacks.

A `ktrainer.callbacks.Callback` is a Keras callback that may also hear of steps, gradients,
logging and restores, and that can be resumed. `ktrainer.training.loop` has the order of events.

Logs of a batch, in `on_train_batch_end`, `on_test_batch_end`, `on_step_end` and
`on_step_checkpoint`, are this rank's: its metrics of the epoch so far, over its own examples. They
differ between ranks, so base no decision on them that all ranks must take alike. With
`logging.batch_logs=all` the first two get logs over all ranks, equal on every rank and to those of
one process. Logs of `on_log`, validation and epochs are always over all ranks. So are all logs
where one process holds all replicas, as under `mirrored`.

`step` in `on_step_begin` counts the updates already done, so it is 0 before the first; in
the others it counts the updates done, this one included.

Alone, under `keras.Model.fit`, there is no trainer: the base class derives `on_step_begin`,
`on_step_end` and `on_step_checkpoint` from Keras' batch events and keeps the counters itself. A
subclass that overrides `on_train_begin`, `on_epoch_begin`, `on_epoch_end`, `on_train_batch_begin`
or `on_train_batch_end` must therefore call `super()`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import keras

from ktrainer.distributed import World, current_world
from ktrainer.runtime.run_folder import of_fit
from ktrainer.state.nested_logs import as_floats as as_floats
from ktrainer.state.progress import Progress
from ktrainer.state.slowness import Slow
from ktrainer.state.time_shares import CALLBACK
from ktrainer.state.train_state import TrainState

F = TypeVar("F", bound=Callable[..., Any])

EXTRA_EVENTS = (
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_times",
    "on_slow",
    "on_validation_end",
    "on_step_checkpoint",
    "on_epoch_cut",
    "on_restore",
    "on_heal",
)


class Callback(keras.callbacks.Callback):
    """A Keras callback with step, gradient, logging and restore events, and a state.

    Attributes:
        rank_zero_only: whether this callback runs on rank 0 only. Such a callback must not
            communicate.
        trainer: the trainer that runs this callback; None under plain Keras.
        time_share: of the class: what the time of its events is counted as; None: as
            `callback NAME`.
    """

    rank_zero_only: bool = False
    time_share: str | None = None
    trainer: Any = None
    _own_world: World | None = None
    _own_state: TrainState | None = None
    _began: float = 0.0

    # -- the run

    def set_trainer(self, trainer: Any) -> None:
        """Remember the trainer; called by the loop after `set_model`."""
        self.trainer = trainer

    @property
    def world(self) -> World:
        """The trainer's world; alone, the world of this process."""
        if self.trainer is not None:
            return self.trainer.world
        return self._own_world if self._own_world is not None else current_world()

    @property
    def train_state(self) -> TrainState:
        """The state of the run; alone, this callback's own."""
        if self.trainer is not None:
            return self.trainer.state
        if self._own_state is None:
            self._own_state = TrainState()
        return self._own_state

    @property
    def progress(self) -> Progress:
        """The trainer's counters; alone, this callback's own."""
        return self.train_state.progress

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in an epoch; None when unknown."""
        if self.trainer is not None:
            return self.train_state.steps_per_epoch
        return (self.params or {}).get("steps")

    @property
    def run_dir(self) -> Path | None:
        """The run's folder; None without a trainer."""
        return Path(self.trainer.run_dir) if self.trainer is not None else None

    def run_path(self, name: str) -> Path | None:
        """The path of `name` in the run's folder for this `fit`: each `fit` of a script has files
        of its own (`metrics.csv`, `metrics-2.csv`, ...). None without a trainer."""
        folder, state = self.run_dir, self.train_state
        return of_fit(folder / name, state.fits, state.inside) if folder else None

    def request_stop(self, reason: str) -> None:
        """Request a stop after this step. Call it on all ranks alike."""
        self.train_state.request_stop(reason)
        self.model.stop_training = True

    def max_updates_per_call(self) -> int | None:
        """The most updates, at least 1, that one call of the compiled step may make before this
        callback's events of batches and steps are called; None: no limit.

        For `trainer.steps_per_call=auto`. A class that overrides such an event and not this method,
        or inherits the two from different bases, has the limit 1. One that defines it gets, in one
        process, the begin of a call's first batch before the call, the other events of its batches
        after it, and events of steps once a call; also with a number for `steps_per_call`, to
        which this limit does not apply.
        """
        return None

    # -- events beyond Keras' own

    def on_step_begin(self, step: int) -> None:
        """Before an update; `step` updates have been done so far."""

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        """After an update, the `step`-th. `logs` are this rank's, perhaps still tensors."""

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        """Every `logging.every`: `logs` are floats, those of all ranks. A callback may add values,
        alike on all ranks: those after it see them, the loggers too."""

    def on_times(self, epoch: int, ranks: Sequence[Mapping[str, float]]) -> None:
        """After an epoch, and once more at the end of training, also by a signal: what each rank's
        time since the last time went to.

        Args:
            epoch: that has ended, from 0; at the end of training, the last one.
            ranks: of each rank, `seconds`, and how many of them each share took; see
                `ktrainer.state.time_shares`.
        """

    def on_slow(self, slow: Slow) -> None:
        """Something that slows training was named (`logging.slow`), at that step."""

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        """After a validation inside an epoch: `logs` have `val_` keys, and are of all ranks."""

    def on_step_checkpoint(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        """After all other events of the `step`-th update: a state saved here is that of callbacks
        that have seen all of it. `logs` are those of `on_step_end`."""

    def on_epoch_cut(self, epoch: int) -> None:
        """A stop in mid-epoch. `on_epoch_end` follows, now and again when a resumed run completes
        the epoch."""

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Change the gradients of an update: traced into the step, after the all-reduce and
        before clipping. Only called when overridden; not called under plain Keras. In a
        pipeline each process sees the gradients of its own stage.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None; loss scales are divided out.
            variables: what they are of, in the same order.
        """
        return gradients

    def on_restore(self, progress: Progress) -> None:
        """After a checkpoint was restored on all ranks. `progress` is the position to continue
        from: that of the checkpoint, or, after a rollback, its step in the present epoch."""

    def on_heal(self, progress: Progress) -> None:
        """After ranks have failed or joined, on all present ranks; `progress` is the position to
        continue from. States are those of that moment, as after a restore. A rank that has joined,
        or become the first, has just run `on_train_begin` alone: it must not communicate there."""
        self.on_restore(progress)

    def state_dict(self) -> dict[str, Any]:
        """The state of this callback for a checkpoint, as a JSON-able dict."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; called on every rank."""

    def close(self) -> None:
        """Release files, threads and the screen, also after an error. May be called twice."""

    # -- steps, counted here when no trainer counts them

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.trainer is None:
            self._own_state, self._began = TrainState(), time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.trainer is None:
            progress = self.progress
            known = self.steps_per_epoch
            if known is not None:  # a function of the epoch: right after `initial_epoch`, too
                progress.step = epoch * known
            progress.epoch, progress.batch = epoch, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if self.trainer is None:
            self.on_step_begin(self.progress.step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_end(batch, logs)
        if self.trainer is None:
            progress = self.progress
            # Keras counts batches from 0, jumps over several with `steps_per_execution`, and
            # then beyond the last one.
            done = min(batch + 1, self.steps_per_epoch or batch + 1)
            progress.step += done - progress.batch
            progress.batch = done
            progress.elapsed = time.monotonic() - self._began
            self.on_step_end(progress.step, logs)
            self.on_step_checkpoint(progress.step, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.trainer is None:
            self.progress.finish_epoch()


_off: ContextVar[bool] = ContextVar("ktrainer_without_collectives", default=False)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Run code on one rank alone: nothing in it may wait for the other ranks."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def collectives_off() -> bool:
    """Whether the present code runs on one rank alone."""
    return _off.get()


def rank_zero_only(function: F) -> F:
    """Make `function` do nothing, and return None, on every rank but 0.

    ```python
    @rank_zero_only
    def save_picture(): ...
    ```
    """

    @functools.wraps(function)
    def on_root(*args: Any, **kwargs: Any) -> Any:
        if not current_world().is_root:
            return None
        with without_collectives():
            return function(*args, **kwargs)

    return on_root  # type: ignore[return-value]


def is_writer(callback: Any) -> bool:
    """Whether `callback` is one of Keras' that write files or to the network, and so runs on rank 0
    only. One with an attribute `on_every_rank` runs on all."""
    return writes_files(callback) and not getattr(callback, "on_every_rank", False)


def writes_files(callback: Any) -> bool:
    """Whether `callback` is one of Keras' that write files or to the network."""
    writers = (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.CSVLogger,
        keras.callbacks.TensorBoard,
        keras.callbacks.BackupAndRestore,
        keras.callbacks.RemoteMonitor,
        keras.callbacks.OrbaxCheckpoint,
    )
    return isinstance(callback, writers)


def on_rank(callbacks: Iterable[Any], rank: int) -> list[Any]:
    """The callbacks that `rank` runs: all on rank 0, those that do not write on other ranks."""
    return [
        callback
        for callback in callbacks
        if rank == 0 or not (is_writer(callback) or getattr(callback, "rank_zero_only", False))
    ]


def overrides(callback: Any, event: str) -> bool:
    """Whether `callback` overrides `event` of the base classes."""
    return _overrides(type(callback), event)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)  # asked of every callback in every step
def _overrides(kind: type, event: str) -> bool:
    own = getattr(kind, event, None)
    bases = (getattr(Callback, event, None), getattr(keras.callbacks.Callback, event, None))
    return own is not None and own not in bases


def time_share(callback: Any) -> str:
    """The share that the time of a callback's events counts as."""
    return _time_share(type(callback))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)  # asked of every callback in every step
def _time_share(kind: type) -> str:
    own = kind.time_share if issubclass(kind, Callback) else None
    return own or f"{CALLBACK}{kind.__name__}"


def emit(callbacks: Iterable[Any], event: str, *args: Any) -> None:
    """Call one of `EXTRA_EVENTS` on those of `callbacks` that have it, in order."""
    for callback in callbacks:
        # `on_heal` calls another event unless it is overridden.
        does = event == "on_heal" or overrides(callback, event)
        if isinstance(callback, Callback) and does:
            with callback.train_state.times.of(time_share(callback)):
                getattr(callback, event)(*args)


def gradient_hooks(callbacks: Iterable[Any]) -> list[Callable[[list[Any], list[Any]], list[Any]]]:
    """The overridden `on_gradients` methods, in order."""
    return [
        callback.on_gradients
        for callback in callbacks
        if isinstance(callback, Callback) and overrides(callback, "on_gradients")
    ]
