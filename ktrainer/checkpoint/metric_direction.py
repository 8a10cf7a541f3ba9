"""The direction in which a metric improves."""

from __future__ import annotations

from typing import Any

from ktrainer.errors import ConfigError


def metric_direction(model: Any, monitor: str) -> str:
    """`min` or `max`: whether a lower or a higher value of the metric `monitor` is better.

    Raises:
        ConfigError: unknown by its name and by the metric itself.
    """
    name = monitor.removeprefix("val_")
    if name == "loss" or name.endswith("_loss"):
        return "min"
    for metric in model.metrics:
        parts = metric.metrics if hasattr(type(metric), "metrics") else [metric]
        for part in parts:
            found = getattr(part, "_direction", None)
            if found and (name == part.name or name.endswith(f"_{part.name}")):
                return "max" if found == "up" else "min"
    raise ConfigError(
        f"cannot tell whether a high or a low {monitor!r} is better; set checkpoint.mode to min "
        "or max.",
        path="checkpoint.mode",
    )
