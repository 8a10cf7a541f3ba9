"""The base of all callbacks, and the order of events.

A `ktrainer.callbacks.Callback` is a Keras callback that may also hear of steps, gradients,
logging and restores, and that can be resumed. The loop calls, on every rank:

    set_params, set_model, set_trainer
    on_train_begin
        (restored: load_state_dict, then on_restore(progress))
        (ranks died or joined, at any time: load_state_dict, then on_heal(progress))
        for each epoch:
            on_epoch_begin(epoch)                       # weights are broadcast here, once
                for each update:
                    on_train_batch_begin(batch)
                    on_step_begin(step)                 # the learning rate is set here
                        [in the compiled step: forward, backward, all-reduce,
                         gradients = on_gradients(gradients, variables), clip, apply]
                    on_step_end(step, logs)             # NaN check
                    on_train_batch_end(batch, logs)     # this rank's; see below
                    (every logging.every:)
                    on_log(step, logs)                  # averaged over ranks, as floats
                    (validation inside the epoch:)
                    on_test_begin .. on_test_batch_* .. on_test_end
                    on_validation_end(step, logs)       # `val_` logs, averaged over ranks
                    on_step_checkpoint(step, logs)      # all have heard of the update
                (a stop left some of the epoch:)
                on_epoch_cut(epoch)                     # the state to go on with is that of now
            on_test_begin .. on_test_end                # validation at the epoch's end
            on_epoch_end(epoch, logs)                   # train and `val_` logs, averaged
    on_train_end
    close                                               # always, also after an error

Logs of a batch, in `on_train_batch_end`, `on_test_batch_end`, `on_step_end` and
`on_step_checkpoint`, are what this rank has computed: its metrics so far in the epoch, of its own
examples. They differ from rank to rank, so decide nothing on them that all ranks must do alike.
With `logging.batch_logs=all` the first two get those of all ranks together, the same on every rank
and as one process would have them. Logs of `on_log`, validation and epochs are always of all ranks.
So are all logs where one process holds all replicas, as under `mirrored`.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import keras

from ktrainer.progress import Progress
from ktrainer.runfolder import of_fit
from ktrainer.step_logs import as_floats as as_floats
from ktrainer.world import World, current

F = TypeVar("F", bound=Callable[..., Any])

EXTRA_EVENTS = (
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_validation_end",
    "on_step_checkpoint",
    "on_epoch_cut",
    "on_restore",
    "on_heal",
)


class Callback(keras.callbacks.Callback):
    """A Keras callback with step, gradient, logging and restore events, and a state.

    Attributes:
        rank_zero_only: whether ranks other than 0 leave this callback out. Such a callback must
            not communicate.
        trainer: the trainer that runs this callback; None under plain Keras.
    """

    rank_zero_only: bool = False
    trainer: Any = None
    _own_world: World | None = None
    _own_progress: Progress | None = None
    _began: float = 0.0

    # -- what a callback can ask

    def set_trainer(self, trainer: Any) -> None:
        """Remember the trainer; called by the loop after `set_model`."""
        self.trainer = trainer

    @property
    def world(self) -> World:
        """The trainer's world; alone, the world of this process."""
        if self.trainer is not None:
            return self.trainer.world
        return self._own_world if self._own_world is not None else current()

    @property
    def progress(self) -> Progress:
        """Where the run stands: the trainer's counters; alone, this callback's own."""
        if self.trainer is not None:
            return self.trainer.progress
        if self._own_progress is None:
            self._own_progress = Progress()
        return self._own_progress

    @property
    def steps_per_epoch(self) -> int | None:
        """Updates in an epoch; None when nobody knows."""
        if self.trainer is not None:
            return self.trainer.steps_per_epoch
        return (self.params or {}).get("steps")

    @property
    def run_dir(self) -> Path | None:
        """The run's folder; None without a trainer."""
        return Path(self.trainer.run_dir) if self.trainer is not None else None

    def run_path(self, name: str) -> Path | None:
        """Where in the run's folder this `fit` writes what is called `name`: each `fit` of a script
        has files of its own (`metrics.csv`, `metrics-2.csv`, ...). None without a trainer."""
        folder = self.run_dir
        return of_fit(folder / name, getattr(self.trainer, "fits", 1)) if folder else None

    def request_stop(self, reason: str) -> None:
        """Ask for the end of training after this step. Call it on all ranks alike."""
        if self.trainer is not None:
            self.trainer.request_stop(reason)
        else:
            self.model.stop_training = True

    # -- events beyond Keras' own

    def on_step_begin(self, step: int) -> None:
        """Before an update; `step` updates have been done so far."""

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        """After an update, the `step`-th. `logs` are this rank's, perhaps still tensors."""

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        """Every `logging.every`: `logs` are floats, averaged over ranks."""

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        """After a validation inside an epoch: `logs` have `val_` keys, averaged over ranks."""

    def on_step_checkpoint(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        """After everything that follows the `step`-th update: whoever saves a state here has that
        of callbacks that have heard all. `logs` are those of `on_step_end`."""

    def on_epoch_cut(self, epoch: int) -> None:
        """A stop leaves some of the epoch's updates to a later run. `on_epoch_end` follows, here
        and again when the later run has done the rest."""

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Change the gradients of an update: traced into the step, after the all-reduce and
        before clipping. Only called when overridden; not called under plain Keras. In a
        pipeline each process sees the gradients of its own stage."""
        return gradients

    def on_restore(self, progress: Progress) -> None:
        """After a checkpoint was restored on all ranks; `progress` is where the run goes on: where
        the checkpoint stood, or, after a rollback, with its step in the present epoch."""

    def on_heal(self, progress: Progress) -> None:
        """After ranks have died or joined, on all that are there now; `progress` is where they go
        on. States are those of that moment, as after a restore. A rank that has joined, or become
        the first, has run `on_train_begin` just before, alone: it must not communicate there."""
        self.on_restore(progress)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep of this callback, as a JSON-able dict."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; called on every rank."""

    def close(self) -> None:
        """Let go of files, threads and the screen, also after an error. May be called twice."""

    # -- steps, counted here when no trainer counts them

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.trainer is None:
            self._own_progress, self._began = Progress(), time.monotonic()

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
    """Code of one rank alone: what it calls must not wait for the others."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


def collectives_off() -> bool:
    """Whether the code that runs is one rank's alone."""
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
        if not current().is_root:
            return None
        with without_collectives():
            return function(*args, **kwargs)

    return on_root  # type: ignore[return-value]


def is_writer(callback: Any) -> bool:
    """Whether `callback` is one of Keras' that write files or to the network: ranks other than
    0 leave it out. With an attribute `on_every_rank` it writes in another way."""
    if getattr(callback, "on_every_rank", False):
        return False
    writers = (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.CSVLogger,
        keras.callbacks.TensorBoard,
        keras.callbacks.BackupAndRestore,
        keras.callbacks.RemoteMonitor,
    )
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    return isinstance(callback, writers) or (bool(orbax) and isinstance(callback, orbax))


def on_rank(callbacks: Iterable[Any], rank: int) -> list[Any]:
    """The callbacks that `rank` runs: all on rank 0; elsewhere those that write are left out."""
    return [
        callback
        for callback in callbacks
        if rank == 0 or not (is_writer(callback) or getattr(callback, "rank_zero_only", False))
    ]


def overrides(callback: Any, event: str) -> bool:
    """Whether `callback` does something at `event` beyond what the base classes do."""
    own = getattr(type(callback), event, None)
    bases = (getattr(Callback, event, None), getattr(keras.callbacks.Callback, event, None))
    return own is not None and own not in bases


def emit(callbacks: Iterable[Any], event: str, *args: Any) -> None:
    """Call one of `EXTRA_EVENTS` on those of `callbacks` that have it, in order."""
    for callback in callbacks:
        # `on_heal` calls another event unless it is overridden.
        does = event == "on_heal" or overrides(callback, event)
        if isinstance(callback, Callback) and does:
            getattr(callback, event)(*args)


def gradient_hooks(callbacks: Iterable[Any]) -> list[Callable[[list[Any], list[Any]], list[Any]]]:
    """The `on_gradients` methods that do something, in order."""
    return [
        callback.on_gradients
        for callback in callbacks
        if isinstance(callback, Callback) and overrides(callback, "on_gradients")
    ]
