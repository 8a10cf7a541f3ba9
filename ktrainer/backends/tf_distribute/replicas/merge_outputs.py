"""Merge the results of a step on several replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.data.local_batch import graph_bounds
from ktrainer.state.nested_logs import LogPath, flatten_paths, unflatten_paths
from ktrainer.steps.step_context import StepContext


@dataclass
class ReplicaOutcome:
    """The results of a step on all replicas, to be merged outside of them.

    Attributes:
        values: what the step returned, on each replica of this process.
        weights: each replica's part of the update, float64.
        statistics: new values of variables other than weights and metrics, the same on all.
        metrics: what each replica adds to the metrics' variables.
        bad: whether the update was skipped; None where none is.
    """

    values: list[Any]
    weights: list[tf.Tensor]
    statistics: list[tuple[Any, tf.Tensor]]
    metrics: list[tuple[Any, list[tf.Tensor]]]
    bad: tf.Tensor | None = None

    def assign(self) -> None:
        """Give statistics and metrics their new values, unless the update was skipped."""
        bad = self.bad
        for variable, value in self.statistics:
            variable.assign(value if bad is None else _unless(bad, value, variable.value))
        for variable, parts in self.metrics:
            more = tf.add_n(parts)
            variable.assign_add(more if bad is None else _unless(bad, more, tf.zeros_like(more)))


def joined_logs(
    logs: Sequence[Any], weights: Sequence[tf.Tensor], results: Mapping[LogPath, Any]
) -> Any:
    """The logs of all replicas: of metrics their results, of the rest the weighted mean.

    Args:
        logs: what the step returned on each replica.
        weights: each replica's part of the update.
        results: those logs that are known, by path.
    """
    first = logs[0]
    if not isinstance(first, Mapping):
        return _mean(list(logs), weights)
    every = [flatten_paths(each) for each in logs]
    means = {
        path: _mean([values[path] for values in every], weights)
        for path in every[0]
        if path not in results
    }
    return unflatten_paths(first, {**means, **results})


def joined_outputs(outputs: Sequence[Any], rows: tf.Tensor) -> Any:
    """The outputs of all replicas of a process in the order of its rows, without padding: that is
    all that a replica without rows has put out. Of others every row counts, however many.

    Args:
        outputs: nested tensors, for each replica.
        rows: int64 scalar; how many true rows they have together.
    """
    count = len(outputs)
    has_rows = [graph_bounds(rows, i, count)[1] > 0 for i in range(count)]

    def join(*parts: Any) -> Any:
        kept = [
            part[: tf.where(has, tf.shape(part)[0], 0)]
            for has, part in zip(has_rows, parts, strict=True)
        ]
        return kept[0] if count == 1 else tf.concat(kept, 0)

    return keras.tree.map_structure(join, *outputs)


def averaged(context: StepContext, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """The weighted means over replicas of those that are floats; the rest as they are."""
    floats = [i for i, value in enumerate(values) if value.dtype.is_floating]
    if context.collectives is None or not floats:
        return values
    # The weights of the local batches of one update add up to 1, those of one alone need not.
    widest = max((values[i].dtype for i in floats), key=lambda dtype: dtype.size)
    each = [*(values[i] for i in floats), tf.ones([], widest)]
    *sums, weight = context.collectives.reduce(each, context.weight, context.order)
    for i, total in zip(floats, sums, strict=True):
        values[i] = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
    return values


def if_present(context: StepContext, value: tf.Tensor) -> tf.Tensor:
    """`value`, or zeros on a replica that has no rows of its own."""
    return tf.where(context.weight > 0, value, tf.zeros_like(value))


def _mean(values: list[Any], weights: Sequence[tf.Tensor]) -> Any:
    """The weighted mean of structures of numbers; what is no number is the first one's."""
    total = tf.add_n(list(weights))

    def mean(*parts: Any) -> Any:
        if not all(isinstance(p, (tf.Tensor, int, float, np.ndarray, np.generic)) for p in parts):
            return parts[0]
        floats = [tf.convert_to_tensor(part) for part in parts]
        if not floats[0].dtype.is_floating:
            return parts[0]
        scaled = [
            tf.math.multiply_no_nan(f, tf.cast(w, f.dtype))
            for f, w in zip(floats, weights, strict=True)
        ]
        return tf.math.divide_no_nan(tf.add_n(scaled), tf.cast(total, floats[0].dtype))

    return keras.tree.map_structure(mean, *values)


def _unless(bad: tf.Tensor, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(bad, tf.cast(other, value.dtype), value)
