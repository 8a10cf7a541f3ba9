"""Factors on the learning rate as pure functions of the position in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ktrainer.errors import ConfigError
from ktrainer.state.durations import Duration

SCALES = ("none", "linear", "sqrt")


def scale_factor(scale: str, size: int) -> float:
    """The factor of `size` ranks on the base rate: 1, `size`, or its square root.

    Raises:
        ConfigError: `scale` is not one of `none`, `linear`, `sqrt`.
    """
    if scale not in SCALES:
        raise ConfigError(
            f"{scale!r} is no way to scale the learning rate; use none, linear or sqrt.",
            path="lr.scale",
            value=scale,
            known=SCALES,
        )
    return {"none": 1.0, "linear": float(size), "sqrt": math.sqrt(size)}[scale]


def warmup_factor(position: float, length: float, size: int) -> float:
    """Gradual warm-up from 1/`size` to 1 (Goyal et al. 2017, "Accurate, Large Minibatch SGD").

    Args:
        position: epochs, or steps, since the start of training; fractions count.
        length: the warm-up's length in the same unit.
        size: number of ranks. With one rank the factor is always 1.
    """
    if length <= 0 or position >= length:
        return 1.0
    return (position * (size - 1) / length + 1) / size


@dataclass(frozen=True)
class LrStage:
    """One entry of a schedule: from `start` until `end` the rate is multiplied.

    Attributes:
        start, end: durations since the start of training; `end` None: never ends.
        multiplier: a number, or a function of the position in `start`'s unit (epochs, steps).
        staircase: whether a function is given whole numbers only, so that in epochs the rate
            changes at their starts.
    """

    start: Duration
    multiplier: float | Callable[[float], float]
    end: Duration | None = None
    staircase: bool = True

    @classmethod
    def of(cls, spec: Any) -> LrStage:
        """A stage from a stage, a mapping, or a config object with the same names.

        Raises:
            ConfigError: `start` or `end` is no number of epochs or steps.
        """
        if isinstance(spec, LrStage):
            return spec
        if not isinstance(spec, Mapping):
            names = ("start", "multiplier", "end", "staircase")
            spec = {name: getattr(spec, name) for name in names if hasattr(spec, name)}
        values = dict(spec)
        start = as_duration(values.pop("start", None) or "0ba", "lr.schedule.start")
        end = as_duration(values.pop("end", None), "lr.schedule.end")
        assert start is not None
        return cls(start=start, end=end, **values)

    def factor(
        self, step: int, steps_per_epoch: int | None, epoch_step: int | None = None
    ) -> float:
        """The multiplier of the update that follows `step` updates; 1 outside of the stage.

        Args:
            epoch_step: how many updates the epochs so far have at their present length, for
                durations in epochs; default: `step`.
        """
        begin = self.start.steps(steps_per_epoch)
        at = {"ba": step, "ep": step if epoch_step is None else epoch_step}
        if at[self.start.unit] < begin:
            return 1.0
        if self.end is not None and at[self.end.unit] >= self.end.steps(steps_per_epoch):
            return 1.0
        if not callable(self.multiplier):
            return float(self.multiplier)
        unit = self.start.unit
        position = at[unit] / Duration(1, unit).steps(steps_per_epoch)
        return float(self.multiplier(math.floor(position) if self.staircase else position))


def as_duration(value: str | Duration | None, path: str) -> Duration | None:
    """A number of epochs or steps.

    Raises:
        ConfigError: it is no duration, or a time.
    """
    if value is None:
        return None
    duration = Duration.parse(value, path, ("ep", "ba"))
    if duration.unit == "s":
        raise ConfigError(
            f"{value!r} is a time, but the learning rate is a function of the step: give epochs "
            "('5ep') or updates ('500ba').",
            path=path,
            value=str(value),
        )
    return duration
