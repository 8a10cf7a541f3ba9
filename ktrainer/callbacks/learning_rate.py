"""The learning rate as a pure function of the position: the step, or the epoch and its batch.

Events used: `set_model` (wrap schedules before the step is traced), `on_train_begin` and
`on_epoch_begin` (read rates that other callbacks restored; set the base rate), `on_step_begin` (set
the rate of the next step), `on_train_end` (set the base rate again).

    rate(step) = base * scale(size) * warmup(step) * product of the active multipliers

Durations in epochs go by the epochs that are over, whatever number of updates they had. Nothing is
accumulated from step to step, so a resume, or a second `fit`, cannot compound. The base rate is the
optimizer's when a `LearningRate` first saw it; it is part of the callback's state in a checkpoint.
Other callbacks find it in the optimizer at the begin of an epoch, and of a batch, so that those
which set a rate then, whatever the one before, set the base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ktrainer.callbacks.base import Callback
from ktrainer.callbacks.lr_schedules import (
    LrStage,
    as_duration,
    scale_factor,
    warmup_factor,
)
from ktrainer.distributed import World
from ktrainer.state.durations import Duration
from ktrainer.steps.named_variables import INTERNAL
from ktrainer.steps.variable_placement import placement_of


@dataclass
class _Rate:
    """The learning rate of one optimizer."""

    base: float | None  # unscaled; None: the optimizer has a schedule, or function, of its own
    set_to: float | None  # the rate when last read, to detect changes by other code
    factor: float = 1.0  # on the base at present
    momentum: float = 1.0  # the factor that the momentum follows: that of the last update
    variable: Any = None  # the factor, where an optimizer's own schedule is multiplied

    def reconcile(self, present: float | None) -> None:
        """Apply a rate that other code has set as a change of the base by the same ratio."""
        if self.base is None or present is None or present == self.set_to:
            return
        if self.set_to and self.factor != 1:
            self.base *= present / self.set_to
        elif self.factor > 0:
            self.base = present / self.factor
        self.set_to = present


# By optimizer, not in the callback: a new callback on a model that was already trained must know
# the base rate, and not mistake the scaled one for it.
_rates: WeakKeyDictionary[Any, _Rate] = WeakKeyDictionary()


class LearningRate(Callback):
    """Scale, warm up and schedule the learning rate of all of a model's optimizers.

    Works with a float rate and with a `LearningRateSchedule` (whose values are multiplied). A
    rate that other code sets as an epoch or a batch begins, such as LearningRateScheduler, is the
    base. One that is set later, as by ReduceLROnPlateau, changes the base by the same ratio.
    Alone under Keras, put this callback before such callbacks.

    Args:
        scale: `none`, `linear` (times the number of processes, or of replicas where
            several processes hold one model) or `sqrt`.
        warmup: how long to warm up, for example `"5ep"` or `"500ba"`; see `warmup_factor`.
        schedule: stages, see `LrStage`; active ones multiply each other.
        momentum_correction: when the rate changes, scale the momentum slots of SGD and RMSprop
            by new/old, because they hold past steps times the old rate (Goyal et al., 2.2).
        steps_per_epoch: updates in an epoch; default: the trainer's or Keras' number.
        world: the ranks; default: the trainer's, or this process's.

    Raises:
        ConfigError: an unknown scale, a length in seconds, or one in epochs of unknown length.
    """

    def __init__(
        self,
        scale: str = "none",
        warmup: str | Duration | None = None,
        schedule: Iterable[Any] = (),
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__()
        scale_factor(scale, 1)
        self.scale = scale
        self.warmup = as_duration(warmup, "lr.warmup")
        self.schedule = [LrStage.of(stage) for stage in schedule]
        self.momentum_correction = momentum_correction
        self._given_steps = steps_per_epoch
        self._own_world = world
        self._made: list[int] = []  # updates of each optimizer, up to `on_train_begin`
        self._look = True  # other code may have changed the rate since it was set
        self._optimizers: list[Any] = []

    def factor(self, step: int) -> float:
        """The factor on the base rate in the update that follows `step` updates."""
        size, steps = self.world.nominal_replicas, self._given_steps or self.steps_per_epoch
        factor, epoch_step = scale_factor(self.scale, size), self._epoch_step(step)
        if self.warmup is not None and size > 1:
            at = epoch_step if self.warmup.unit == "ep" else step
            factor *= warmup_factor(at, self.warmup.steps(steps), size)
        for stage in self.schedule:
            factor *= stage.factor(step, steps, epoch_step)
        return factor

    def _epoch_step(self, step: int) -> int:
        """The position in updates if all epochs so far had had the present number: not `step` after
        a resume with another batch size, or after a rollback, which keeps the epoch."""
        progress, steps = self.progress, self.steps_per_epoch
        if self._given_steps or steps is None:
            return step
        return step + progress.epoch * steps + progress.batch - progress.step

    @property
    def is_active(self) -> bool:
        """Whether rates are scaled, warmed up or scheduled."""
        return self.scale != "none" or self.warmup is not None or bool(self.schedule)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if self._find_rates():
            model.train_function = None  # it may have been traced without the factor

    def _find_rates(self) -> bool:
        """Learn of all optimizers; return whether the schedule of one is multiplied from now on."""
        self._optimizers = plain_optimizers(self.model)  # not at each step: it walks all layers
        found = False
        for optimizer in self._optimizers:
            rate, present = _rates.get(optimizer), _float_rate(optimizer)
            if rate is not None and (rate.base is None) != (present is None):
                if rate.variable is not None:
                    rate.variable.assign(1.0)
                rate = None
                del _rates[optimizer]  # it was given a schedule since, or a rate
            if rate is not None:
                rate.reconcile(present)  # the user's own change between two fits
            elif self.is_active:
                _rates[optimizer] = rate = _Rate(present, present)
                if present is None:
                    rate.variable, found = multiply_schedule(optimizer), True
        return found

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._find_rates()  # some optimizers may have been built since `set_model`
        self._made = [int(optimizer._iterations.numpy()) for optimizer in self._optimizers]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._look = True
        self._take_restored()
        # A resume inside an epoch goes on with the rate that it has.
        if not self.progress.batch and not self.progress.begun:
            self.set_base()

    def set_base(self) -> None:
        """Let other callbacks find the base rate, and set it, until the next step begins."""
        self._look = True
        for optimizer, rate in self._known():
            if rate.base is not None:
                _multiply(optimizer, rate, 1.0)

    def _take_restored(self) -> None:
        """Read the rates that were restored in `on_train_begin`, as by Keras' BackupAndRestore. The
        updates that the optimizer has made were restored, too: it is no rate of the user's, but one
        that a LearningRate had set for the last of them."""
        for optimizer, made in zip(self._optimizers, self._made, strict=False):
            rate = _rates.get(optimizer)
            if rate is None or not rate.base or made == int(optimizer._iterations.numpy()):
                continue
            present = _present(optimizer)
            if present != rate.set_to:
                last = self.factor(max(0, self.progress.step - 1))
                # Of a backup inside an epoch, which begins again, it was that of a later update.
                known = self.progress.step == int(optimizer._iterations.numpy())
                if known and last and not math.isclose(present / last, rate.base, rel_tol=1e-6):
                    rate.base = present / last  # others had changed it
                rate.factor = rate.momentum = present / rate.base
                rate.set_to = present
        self._made = []

    def max_updates_per_call(self) -> int | None:
        changes = self.schedule or (self.warmup is not None and self.world.nominal_replicas > 1)
        return 1 if changes else None

    def on_step_begin(self, step: int) -> None:
        factor: float | None = None
        for optimizer, rate in self._known():
            factor = self.factor(step) if factor is None else factor
            if factor != rate.factor or self._look:
                self._set(optimizer, rate, factor)
        self._look = False

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        for optimizer, rate in self._known():
            self._set(optimizer, rate, 1.0)  # a saved model is not scaled again

    def _known(self) -> Iterator[tuple[Any, _Rate]]:
        for optimizer in self._optimizers:
            if optimizer in _rates:
                yield optimizer, _rates[optimizer]

    def _set(self, optimizer: Any, rate: _Rate, factor: float) -> None:
        """Multiply a rate by `factor`, and have the momentum follow."""
        _multiply(optimizer, rate, factor)
        before, rate.momentum = rate.momentum, factor
        if not self.momentum_correction or before in (0, factor):
            return
        placement = placement_of(self.model)
        for slot in velocities(optimizer):
            if placement is not None and not placement.holds(slot):
                continue
            slot.assign(slot * keras.ops.cast(factor / before, slot.dtype))

    def state_dict(self) -> dict[str, Any]:
        rates: list[dict[str, float | None]] = []
        for optimizer in self._optimizers:
            rate = _rates.get(optimizer)
            if rate is None:
                rates.append({"base": None, "factor": None, "set_to": None})
                continue
            if rate.base is not None:
                rate.reconcile(_present(optimizer))
            names = ("base", "factor", "set_to", "momentum")
            rates.append({name: getattr(rate, name) for name in names})
        return {"rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("rates", [])
        for optimizer, old in zip(self._optimizers, saved, strict=False):
            rate = _rates.get(optimizer)
            if rate is None and old["base"] is not None:
                # Scaled when it was saved, but not configured now: back to the base.
                present = _float_rate(optimizer)
                _rates[optimizer] = rate = _Rate(present, present)
            if rate is not None and rate.base is not None and old["factor"] is None:
                rate.base = rate.set_to = _present(optimizer)  # not scaled when it was saved
                rate.factor = rate.momentum = 1.0
            if rate is None or old["factor"] is None:
                continue
            rate.factor, rate.momentum = old["factor"], old.get("momentum", old["factor"])
            if rate.variable is not None:
                rate.variable.assign(rate.factor)
            elif rate.base is not None and old["base"] is not None:
                rate.base, rate.set_to = old["base"], old["set_to"]


class BaseRateAtBatches(Callback):
    """Sets the base rate as a batch begins, for callbacks after it that set a rate then."""

    def __init__(self, rate: LearningRate) -> None:
        super().__init__()
        self._rate = rate

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_train_batch_begin(batch, logs)
        self._rate.set_base()


def plain_optimizers(model: Any) -> list[Any]:
    """The model's optimizers that hold a rate: those inside of LossScale and Multi wrappers."""
    from ktrainer.steps import optimizers_of
    from ktrainer.steps.named_variables import built_optimizers

    main = getattr(model, "optimizer", None)
    if getattr(getattr(main, "inner_optimizer", main), "optimizers", None) == []:
        built_optimizers(model)  # a MultiOptimizer that asks a function for them, as it is built
    found: list[Any] = []
    waiting = list(optimizers_of(model))
    while waiting:
        optimizer = waiting.pop(0)
        inner = getattr(optimizer, "inner_optimizer", None)
        several = getattr(optimizer, "optimizers", None)
        if inner is not None:
            waiting.insert(0, inner)
        elif several is not None:
            waiting[:0] = list(several)
        elif not any(optimizer is other for other in found):
            found.append(optimizer)
    return found


def rate_of_last_update(optimizer: Any) -> float:
    """The learning rate of the update that was made last: a schedule of the optimizer's own gives
    that of the next."""
    schedule = optimizer._learning_rate
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    rate = _rates.get(optimizer)
    factor = 1.0 if rate is None or rate.variable is None else float(rate.variable.numpy())
    return factor * float(schedule(max(0, int(optimizer._iterations.numpy()) - 1)))


def _float_rate(optimizer: Any) -> float | None:
    rate = optimizer._learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def _present(optimizer: Any) -> float:
    return float(optimizer._learning_rate.numpy())


def _multiply(optimizer: Any, rate: _Rate, factor: float) -> None:
    """Make the rate `factor` times the base, or the optimizer's own schedule."""
    if rate.base is None:
        rate.variable.assign(factor)
        rate.factor = factor
        return
    rate.reconcile(_present(optimizer))
    if factor != rate.factor:
        optimizer._learning_rate.assign(rate.base * factor)
        rate.factor, rate.set_to = factor, _present(optimizer)


def multiply_schedule(optimizer: Any) -> Any:
    """Multiply the values of the optimizer's own schedule by a variable; return the variable.

    The schedule object is unchanged, so saved models hold the user's schedule. The method is
    replaced on this one optimizer, because Keras reads schedules nowhere else.
    """
    original = optimizer._get_current_learning_rate
    factor = keras.Variable(1.0, trainable=False, dtype="float32", name=f"factor_{INTERNAL}")

    def scaled() -> Any:
        value = keras.ops.convert_to_tensor(original())
        return value * keras.ops.cast(factor, value.dtype)

    optimizer._get_current_learning_rate = scaled
    return factor


def velocities(optimizer: Any) -> list[Any]:
    """Slots that hold past steps times their learning rate."""
    if isinstance(optimizer, keras.optimizers.SGD):
        slots = getattr(optimizer, "momentums", [])
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        slots = getattr(optimizer, "_momentums", [])
    else:
        slots = []
    return [slot for slot in slots if slot is not None]
