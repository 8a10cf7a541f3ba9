"""Compare compiled metrics of a whole batch with those of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.backend import get_keras_mask, set_keras_mask

from ktrainer.data.local_batch import take_slice
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.verify.side_effects import Untouched

_WITHIN = 1e-4  # relative: metrics of both ways are computed from the same predictions


@dataclass(frozen=True)
class MetricDifference:
    """A metric whose result depends on how examples are divided into batches.

    Attributes:
        name: of the metric.
        whole, split: its results.
        parts: how many there were.
        examples: of how many in all.
    """

    name: str
    whole: float
    split: float
    parts: int
    examples: int

    def explain(self, split: str) -> str:
        """Text of a warning of it; `split` is into what an update is split."""
        return (
            f"the metric {self.name} will not be as in one process: for {self.examples} examples "
            f"it is {self.whole:.6g} at once and {self.split:.6g} in {self.parts} parts. An update "
            f"is split into {split}. The metric couples examples: it compares some with others, "
            "perhaps because shapes such as (batch,) and (batch, 1) broadcast, or it is no sum or "
            "mean over examples. Training is not affected."
        )


@contextmanager
def recorded_updates(model: keras.Model) -> Iterator[list[tuple[Any, ...]]]:
    """Record, within the block, the targets, predictions and weights that compiled metrics get."""
    updates: list[tuple[Any, ...]] = []
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None:
        yield updates
        return

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        updates.append((y_true, y_pred, sample_weight))
        return type(metrics).update_state(metrics, y_true, y_pred, sample_weight)

    with replaced((metrics, "update_state", update_state)):
        yield updates


def coupled_metric(
    model: keras.Model, updates: list[tuple[Any, ...]], rows: int, parts: int
) -> MetricDifference | None:
    """The first compiled metric that gives another result for parts of equal size, updated one
    after another, than for all examples at once; None if there is none.

    Args:
        updates: what `recorded_updates` found; one update is compared.
    """
    if len(updates) != 1 or rows % parts:
        return None
    try:
        with Untouched(model):
            whole = _results(model, updates)
            slices = [_with_masks(updates[0], rows, part, parts) for part in range(parts)]
            split = _results(model, slices)
        pairs = list(zip(whole, split, strict=True))
    except Exception:  # a metric of the user's own may need anything: it is not compared
        return None
    for (name, a), (_, b) in pairs:
        if np.isfinite([a, b]).all() and abs(a - b) > _WITHIN * max(abs(a), abs(b), 1e-3):
            return MetricDifference(name, a, b, parts, rows)
    return None


def _with_masks(update: Any, rows: int, part: int, parts: int) -> Any:
    """A part of what metrics get, with the Keras masks of its tensors."""
    cut = take_slice(update, rows, part, parts)
    for whole, piece in zip(keras.tree.flatten(update), keras.tree.flatten(cut), strict=True):
        if (mask := get_keras_mask(whole)) is not None:
            set_keras_mask(piece, take_slice(mask, rows, part, parts))
    return cut


def _results(model: keras.Model, updates: list[tuple[Any, ...]]) -> list[tuple[str, float]]:
    metrics = model._compile_metrics
    metrics.reset_state()
    for update in updates:
        metrics.update_state(*update)
    found = []
    for metric in metrics.metrics:
        for value in keras.tree.flatten(metric.result()):
            array = np.asarray(keras.ops.convert_to_numpy(value), np.float64)
            found += [(metric.name, float(each)) for each in array.ravel()]
    return found
