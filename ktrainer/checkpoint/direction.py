"""Which way a metric is better."""

from __future__ import annotations

from typing import Any

from ktrainer.errors import ConfigError


def direction(model: Any, monitor: str) -> str:
    """`min` or `max`: which way the metric `monitor` is better.

    Raises:
        ConfigError: neither its name nor the metric itself tells.
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
