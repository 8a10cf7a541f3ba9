"""Base class of callbacks that only report.

Events used: `on_step_end`, only under plain `keras.Model.fit`, which does not call `on_log`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktrainer.callbacks.base import Callback
from ktrainer.distributed import World
from ktrainer.state.durations import Duration, Every
from ktrainer.state.nested_logs import as_floats


class Reporter(Callback):
    """Shows or writes logs on rank 0.

    Args:
        every: how often steps are reported under plain Keras; with a trainer, `logging.every`
            decides.
        world: the ranks; default: the trainer's, or this process's.
    """

    rank_zero_only = True

    def __init__(self, every: str | Duration = "50ba", world: World | None = None) -> None:
        super().__init__()
        self.every = Every(every)
        self._own_world = world

    @property
    def reports(self) -> bool:
        """Whether this rank reports; Keras calls the callback on all."""
        return self.world.is_root

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.every.steps_per_epoch = self.steps_per_epoch
        self.every.start(self.progress)

    def max_updates_per_call(self) -> int | None:
        return None  # `on_log` is called when `logging.every` is due

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.trainer is None and self.reports and self.every.due(self.progress):
            self.on_log(step, as_floats(logs))
