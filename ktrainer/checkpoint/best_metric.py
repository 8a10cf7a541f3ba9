"""The best value of a metric in the logs, and whether a lower or a higher one is better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ktrainer.errors import ConfigError


@dataclass
class BestMetric:
    """The best value so far of a metric.

    Attributes:
        name: of the metric in the logs, such as `val_loss`; None: none is watched.
        mode: whether `min` or `max` is better; `auto` asks the metric.
        value: the best so far.
        step: the step that it was reached in.
    """

    name: str | None
    mode: str = "auto"
    value: float | None = None
    step: int | None = None

    def direction(self, model: Any) -> str:
        """`min` or `max`: whether a lower or a higher value is better."""
        assert self.name is not None
        return metric_direction(model, self.name) if self.mode == "auto" else self.mode

    def check(self, model: Any) -> None:
        """Raise an error if a metric of `model` has the name, and does not say which is better.
        Before the first update Keras has not built what `compile` was given."""
        if self.name is not None and any(_metrics_named(model, self.name)):
            self.direction(model)

    def improves(self, model: Any, value: float) -> bool:
        """Return whether `value` is finite, and better than the best so far."""
        less = self.direction(model) == "min"
        better = self.value is None or (value < self.value if less else value > self.value)
        return better and math.isfinite(value)

    def facts(self, model: Any, step: int) -> dict[str, Any]:
        """The entry of a manifest, if the best value is that of `step`."""
        if self.name is None or self.value is None or self.step != step:
            return {}
        facts = {"name": self.name, "value": float(self.value), "mode": self.direction(model)}
        return {"metric": facts}

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"best": self.name, "best_value": self.value, "best_step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; a state of another metric is ignored."""
        if state.get("best", self.name) == self.name:
            self.value, self.step = state.get("best_value"), state.get("best_step")


def metric_direction(model: Any, monitor: str) -> str:
    """`min` or `max`: whether a lower or a higher value of the metric `monitor` is better.

    Raises:
        ConfigError: unknown by its name and by the metric itself.
    """
    if is_loss(monitor):
        return "min"
    for metric in _metrics_named(model, monitor):
        if found := getattr(metric, "_direction", None):
            return "max" if found == "up" else "min"
    raise ConfigError(
        f"cannot tell whether a high or a low {monitor!r} is better; set checkpoint.mode to min "
        "or max.",
        path="checkpoint.mode",
    )


def _metrics_named(model: Any, monitor: str) -> Iterator[Any]:
    """The metrics whose value may be `monitor` in the logs."""
    name = monitor.removeprefix("val_")
    for metric in model.metrics:
        for part in metric.metrics if hasattr(type(metric), "metrics") else [metric]:
            if name == part.name or name.endswith(f"_{part.name}"):
                yield part


def is_loss(monitor: str) -> bool:
    """Whether a metric is a loss by its name, of which lower values are better."""
    name = monitor.removeprefix("val_")
    return name == "loss" or name.endswith("_loss")
