"""Metrics whose states, counted on parts of the data, add up to those of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from ktrainer.errors import ModelError

# Names of states, in Keras' own metrics, that are sums over examples.
_ADDITIVE = {
    *("total", "count", "sum", "squared_sum", "residual", "num_samples"),
    *("true_positives", "false_positives", "true_negatives", "false_negatives"),
    *("accumulator", "intermediate_weights", "total_confusion_matrix"),
}


def adds_up(metric: Any) -> bool:
    """Return whether the metric of all data has the sum of the states of parts of the data.

    True for Keras' own families (means, sums, confusion counts, AUC, precision and recall, F1,
    IoU, R2), their subclasses without states of their own, and metrics made of such metrics
    alone. Any other metric says so with an attribute `state_adds_up = True` (or False).
    """
    declared = getattr(metric, "state_adds_up", None)
    if declared is not None:
        return bool(declared)
    own = metric._variables
    known = _of_known_family(metric) and all(v.name in _ADDITIVE for v in own)
    return all(adds_up(part) for part in metric._metrics) and (known or not own)


def _of_known_family(metric: Any) -> bool:
    base = keras.metrics.Metric
    return any(
        issubclass(cls, base) and cls is not base and cls.__module__.startswith("keras.")
        for cls in type(metric).__mro__
    )


def is_compiled_metrics(metric: Any) -> bool:
    """Return whether Keras holds the compiled metrics in `metric`, listed in `metric.metrics`."""
    return isinstance(getattr(type(metric), "metrics", None), property)


def leaf_metrics(model: keras.Model) -> Iterator[Any]:
    """The model's metrics, with those that are compiled one by one."""
    for metric in model.metrics:
        if is_compiled_metrics(metric):
            yield from metric.metrics
        else:
            yield metric


def unadded_metrics(model: keras.Model) -> list[Any]:
    """The metrics of which the state of all data is not the sum of the parts' states."""
    return [metric for metric in leaf_metrics(model) if not adds_up(metric)]


def require_sums(model: keras.Model, why: str, instead: str) -> None:
    """Refuse metrics whose states do not add up.

    Args:
        model: whose metrics are looked at.
        why: what cannot be done with them.
        instead: what to set.

    Raises:
        ModelError: naming them.
    """
    names = [metric.name for metric in unadded_metrics(model)]
    if names:
        raise ModelError(
            f"the states of {', '.join(names)} do not add up, as far as is known, so {why}. Set "
            f"`state_adds_up = True` on the metric's class if they do, or {instead}."
        )
