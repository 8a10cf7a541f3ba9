"""Callbacks for `keras.Model.fit` in a function that `elastic.run` decorates, as Horovod has them.

`fit` begins with the first batch of an epoch, so commits at the ends of epochs are exact; after one
in the middle of an epoch its batches come again, unless the script leaves out the first ones.
"""

from __future__ import annotations

from typing import Any

import keras

from ktrainer.dataparallel.elastic_states import State


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every so many batches, and at the end of each epoch.

    The callbacks that update the state do so first, wherever they are in the list of callbacks.

    Args:
        state: the state.
        batches_per_commit: how many batches.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            self._remaining = self.batches_per_commit
            for updater in self.state.updaters.values():
                updater.on_train_batch_end(batch)
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for updater in self.state.updaters.values():
            updater.on_epoch_end(epoch)
        self.state.commit()


class _Updater(keras.callbacks.Callback):
    """Sets an attribute of a state; once more where it is set already, to the same value."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        self.state.updaters[type(self)] = self

    def on_train_end(self, logs: Any = None) -> None:
        self.state.updaters.pop(type(self), None)


class UpdateBatchStateCallback(_Updater):
    """Sets `state.batch` to the batch that has ended, as Horovod's does, and to 0 after an epoch.

    Args:
        state: has an attribute `batch`.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_Updater):
    """Sets `state.epoch` to the number of epochs that have ended, over all calls of `fit`, whether
    these begin at 0, as Horovod's do, or at `initial_epoch=state.epoch`.

    Args:
        state: has an attribute `epoch`.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._before: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._before is None:
            self._before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = (self._before or 0) + epoch + 1
