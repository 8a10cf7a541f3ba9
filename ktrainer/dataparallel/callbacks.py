"""Callbacks for `keras.Model.fit` on each rank, with the names and arguments of Horovod's.

| callback | what it does |
|---|---|
| `BroadcastGlobalVariablesCallback` | equal weights and optimizer variables, right before step 1 |
| `MetricAverageCallback` | the logs of an epoch over the data of all ranks |
| `LearningRateScheduleCallback` | the rate as a pure function of epoch and batch |
| `LearningRateWarmupCallback` | the same, from `initial_lr / size` up to `initial_lr` |

`momentum_correction` scales the momentum slots of SGD and RMSprop by new/old when the rate changes
(Goyal et al. 2017, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ktrainer.callbacks.base import Callback
from ktrainer.callbacks.broadcast import BroadcastVariables
from ktrainer.callbacks.learning_rate import multiply_schedule, plain_optimizers, velocities
from ktrainer.callbacks.lr_schedules import warmup_factor
from ktrainer.callbacks.metric_averaging import AverageMetrics
from ktrainer.dataparallel.process_sets import ProcessSet
from ktrainer.dataparallel.state import group_of, opened
from ktrainer.errors import ModelError

# The factor on an optimizer's own schedule, by optimizer: several callbacks may set it in turn.
_factors: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class BroadcastGlobalVariablesCallback(BroadcastVariables):
    """Give all ranks the variables of one, after `on_train_begin` and before the first step.

    A checkpoint that rank 0 alone has restored by then reaches all ranks.

    Args:
        root_rank: whose variables.
        device: refused if given: variables stay where they are.
        local_variables: variables that stay a rank's own, with the slots that optimizers keep for
            them (Horovod broadcasts these); also `register_local_var`.
        process_set: the ranks; default: all.

    Raises:
        ModelError: an argument cannot be.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        *,
        process_set: ProcessSet | None = None,
    ) -> None:
        if device:
            raise ModelError(
                "BroadcastGlobalVariablesCallback broadcasts variables on the devices where they "
                "are: leave out device."
            )
        group = group_of(process_set)
        super().__init__(group.position_of(root_rank), group.host)
        for variable in local_variables or ():
            self.register_local_var(variable)

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable of the model, and its optimizer's slots, as they are on each rank."""
        self.local.append(variable)


class MetricAverageCallback(AverageMetrics):
    """Make the logs of an epoch, training and validation, those over the data of all ranks.

    States of metrics are summed over ranks, so an AUC or a mean over uneven shards is exact too.
    Place it before callbacks that read logs.

    Args:
        device: refused if given.
        process_set: the ranks; default: all.
    """

    def __init__(self, device: str = "", process_set: ProcessSet | None = None) -> None:
        if device:
            raise ModelError("MetricAverageCallback needs no device: leave it out.")
        super().__init__(group_of(process_set).host)


class LearningRateScheduleCallback(Callback):
    """From `start_epoch` until `end_epoch` the rate is `initial_lr` times a multiplier.

    Nothing accumulates, so a run that continues with `initial_epoch` has the rates of one that was
    not interrupted. Of an optimizer with a LearningRateSchedule, the schedule's values are
    multiplied, and `initial_lr` has no effect.

    Args:
        initial_lr: the rate for the multiplier 1.
        multiplier: a number, or a function of the epoch.
        start_epoch, end_epoch: its epochs; `end_epoch` None: to the end.
        staircase: whether a function is given whole epochs only; else it gets epoch + batch/steps
            at each batch.
        momentum_correction: scale the momentum slots by new/old when the rate changes.
        steps_per_epoch: batches in an epoch; default: Keras' number.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr, self.multiplier = initial_lr, multiplier
        self.start_epoch = start_epoch
        self.end_epoch = math.inf if end_epoch is None else end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self._given_steps = steps_per_epoch
        self._epoch = 0

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        for optimizer in plain_optimizers(model):
            schedule = not isinstance(optimizer._learning_rate, keras.Variable)
            if schedule and optimizer not in _factors:
                _factors[optimizer] = multiply_schedule(optimizer)
                model.train_function = None  # it may have been traced without the factor

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        if self.staircase and self.start_epoch <= epoch < self.end_epoch:
            self.set_multiplier(self._at(epoch))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        if not self.staircase and self.start_epoch <= self._epoch < self.end_epoch:
            self.set_multiplier(self._at(self._epoch + batch / self._steps()))

    def set_multiplier(self, factor: float) -> None:
        """Set the rate of all of the model's optimizers."""
        for optimizer in plain_optimizers(self.model):
            variable, base = _factors.get(optimizer), 1.0
            if variable is None:
                variable, base = optimizer._learning_rate, self.initial_lr
            old = float(variable.numpy())
            variable.assign(base * factor)
            new = float(variable.numpy())
            if self.momentum_correction and old and new != old:
                for slot in velocities(optimizer):
                    slot.assign(slot * keras.ops.cast(new / old, slot.dtype))

    def _at(self, epoch: float) -> float:
        return float(self.multiplier(epoch) if callable(self.multiplier) else self.multiplier)

    def _steps(self) -> int:
        steps = self._given_steps or self.steps_per_epoch
        if not steps:
            raise ModelError(
                "the learning rate changes within an epoch, whose number of batches is unknown. "
                "Give steps_per_epoch to the callback."
            )
        return steps


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Gradual warm-up from `initial_lr / size` to `initial_lr` (Goyal et al. 2017, section 2.2).

    At batch b of epoch e the rate is
    `initial_lr / size * ((e + b / steps) * (size - 1) / warmup_epochs + 1)`; after `warmup_epochs`
    it is `initial_lr`.

    Args:
        initial_lr: the rate after the warm-up, already scaled by the number of ranks.
        warmup_epochs: how many epochs it lasts.
        momentum_correction, steps_per_epoch: as for `LearningRateScheduleCallback`.
        verbose: 1 to print the rate that was reached, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        self.warmup_epochs, self.verbose = warmup_epochs, verbose
        super().__init__(
            initial_lr,
            lambda epoch: warmup_factor(epoch, warmup_epochs, opened().world.size),
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch + 1 == self.end_epoch:
            self.set_multiplier(1.0)
            if self.verbose and opened().world.rank == 0:
                print(f"\nEpoch {epoch + 1}: learning rate {self.initial_lr:g} after the warm-up.")


__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
