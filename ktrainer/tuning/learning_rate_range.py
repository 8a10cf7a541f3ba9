"""The callback of a learning-rate range test.

Events used: `set_model` (put in the rising rate, before the step is traced), `on_train_batch_begin`
(reset metrics, so that logs are of one update), `on_log`, `on_train_end` (write the result,
and end the script).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from ktrainer.callbacks.base import Callback, overrides
from ktrainer.callbacks.broadcast import BroadcastVariables
from ktrainer.callbacks.learning_rate import plain_optimizers
from ktrainer.callbacks.metric_averaging import AverageMetrics
from ktrainer.errors import ModelError
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.tuning.range_test_mode import RangeTest, RangeTestDone
from ktrainer.tuning.rate_suggestion import SKIPS

_FIRST = 10  # updates in which nothing counts as divergence
_DIVERGED = 4.0  # times the best loss
_MEMORY = 0.9  # of the moving average that is compared
_SKIPPED = 100  # updates in a row, after which no more are waited for


def range_test_callbacks(callbacks: Iterable[Any], test: RangeTest) -> list[Any]:
    """The callbacks of a range test: those that compute, and the test's own.

    The others could change the rate, stop, or write files.
    """
    ours = (BroadcastVariables, AverageMetrics)
    kept = [c for c in callbacks if isinstance(c, ours) or overrides(c, "on_gradients")]
    return [*kept, LearningRateRange(test)]


@keras.saving.register_keras_serializable("ktrainer")
class RisingRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that grows by the same factor in each update.

    Args:
        lowest, highest, updates: see `RangeTest`.
        start: updates that the optimizer had made before.
    """

    def __init__(self, lowest: float, highest: float, updates: int, start: int) -> None:
        self.lowest, self.highest, self.updates, self.start = lowest, highest, updates, start

    def __call__(self, step: Any) -> Any:
        done = keras.ops.cast(step - self.start, "float32") / (self.updates - 1)
        return keras.ops.exp(math.log(self.lowest) + done * math.log(self.highest / self.lowest))

    def get_config(self) -> dict[str, Any]:
        return dict(vars(self))


class LearningRateRange(Callback):
    """Raises the rate with every update, and keeps the loss of each over all ranks.

    A step gives the loss before its update, so one step more follows the update with the last rate.

    An update that a loss scale skips raises no rate, and changes no weights: the loss after it is
    left out. Where a step makes several updates, rates are left out.

    Training ends early when the loss has diverged: its moving average is no number, or four times
    the best one.
    """

    def __init__(self, test: RangeTest) -> None:
        super().__init__()
        self.test = test
        self.losses: list[float] = []
        self._indices: list[int] = []  # of the rate of each one's update
        self._average, self._best = 0.0, math.inf
        self._start = self._made = self._skipped = 0  # updates, the last ones in a row
        self._end = ""  # why it is to end

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        test = self.test
        for optimizer in plain_optimizers(model):
            # Not `iterations`, which counts those that Keras' accumulation has applied.
            self._start = start = int(optimizer._iterations.numpy())
            optimizer.learning_rate = RisingRate(test.lowest, test.highest, test.updates, start)
        model.train_function = None  # it may have been traced with the rate of before

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        self.model.reset_metrics()
        self.train_state.counted = MetricCounts()

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        if "loss" not in logs:
            raise ModelError("the step reports no loss, by which rates could be compared")
        made, loss = self._made, float(logs["loss"])  # the loss is of before the update
        self._made = int(plain_optimizers(self.model)[0]._iterations.numpy()) - self._start
        self._skipped = 0 if self._made > made else self._skipped + 1
        is_new = not self._indices or made > self._indices[-1]
        self._end = self._keep(made, loss) if is_new else self._why_no_more(loss)
        if self._end:
            self.trainer.request_stop(self._end)

    def _keep(self, made: int, loss: float) -> str:
        """Keep a loss after `made` updates; return why it is the last one, or nothing."""
        self.losses.append(loss)
        self._indices.append(made)
        count = len(self.losses)
        self._average = _MEMORY * self._average + (1 - _MEMORY) * loss
        average = self._average / (1 - _MEMORY**count)
        if not math.isfinite(average) or (count > _FIRST and average > _DIVERGED * self._best):
            return "the loss has diverged"
        if average > 0:
            self._best = min(self._best, average)
        return "all rates are tested" if made >= self.test.updates else ""

    def _why_no_more(self, loss: float) -> str:
        """Why a loss after a skipped update is the last one, or nothing."""
        if not math.isfinite(loss):
            return "the loss has diverged"
        return SKIPS if self._skipped >= _SKIPPED else ""

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self.world.is_root:
            every = self.test.rates()
            rates = [every[index] for index in self._indices if index < len(every)]
            untested = 0 if self._end else max(1, self.test.updates - self._made)
            found = {"rates": rates, "losses": self.losses, "untested": untested, "why": self._end}
            self.test.result.write_text(json.dumps(found))
        raise RangeTestDone
