"""Average the logs of an epoch over all ranks, under plain Keras.

Events used, alone under `keras.Model.fit`: `on_train_begin`, `on_test_begin` and `on_test_end`
(copy the states before Keras resets them), `on_epoch_end` (overwrite the logs in place),
`on_train_end`. Under our loop this callback does nothing: the loop calls `global_results`.
"""

from __future__ import annotations

from typing import Any

from ktrainer.callbacks.base import Callback
from ktrainer.distributed import World
from ktrainer.steps.metric_reduction import global_results
from ktrainer.steps.metric_states import States, take_states


class AverageMetrics(Callback):
    """Make the logs of an epoch, training and validation, those over all ranks.

    Alone under `keras.Model.fit` it must come before callbacks that read the logs, and every
    rank must validate in the same epochs. A standalone `model.evaluate(callbacks=[...])`
    returns its own rank's results; those over all ranks are in `results`.

    Attributes:
        results: the last evaluation's results over all ranks.
    """

    def __init__(self, world: World | None = None) -> None:
        super().__init__()
        self._own_world = world
        self._training = False
        self._states: States | None = None
        self.results: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._training, self._states, self.results = True, None, {}

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._training = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._training and self.trainer is None:
            self._states = take_states(self.model.metrics)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.trainer is None:
            self.results = global_results(self.model.metrics, self.world, logs=logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.trainer is not None or logs is None:
            return
        validated = self._states is not None
        train = {k: v for k, v in logs.items() if not (validated and k.startswith("val_"))}
        logs.update(global_results(self.model.metrics, self.world, logs=train, states=self._states))
        if validated:
            logs.update({f"val_{key}": value for key, value in self.results.items()})
        self._states = None
