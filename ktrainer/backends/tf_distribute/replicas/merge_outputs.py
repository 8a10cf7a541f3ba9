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
from ktrainer.steps.assigned_variables import over_all_ranks
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.variable_assignments import aggregation_of


@dataclass
class ReplicaOutcome:
    """The results of a step on all replicas, to be merged outside of them.

    Attributes:
        values: what the step returned, on each replica of this process.
        weights: each replica's part of the update, float64.
        statistics: new values of variables other than weights and metrics, the same on all.
        metrics: the metrics' variables, the constants that the step has set them to before it adds
            (None: to none), and what each replica adds.
        bad: whether the update was skipped; None where none is.
    """

    values: list[Any]
    weights: list[tf.Tensor]
    statistics: list[tuple[Any, tf.Tensor]]
    metrics: list[tuple[Any, np.ndarray | None, list[tf.Tensor]]]
    bad: tf.Tensor | None = None

    def assign(self) -> None:
        """Give statistics and metrics their new values, unless the update was skipped."""
        bad = self.bad
        for variable, value in self.statistics:
            variable.assign(value if bad is None else _unless(bad, value, variable.value))
        for variable, constant, parts in self.metrics:
            start = variable.value if constant is None else tf.cast(constant, variable.dtype)
            value = start + tf.add_n(parts)
            variable.assign(value if bad is None else _unless(bad, value, variable.value))


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


def over_replicas(
    context: StepContext, variables: Sequence[Any], old: list[tf.Tensor], new: list[tf.Tensor]
) -> list[tf.Tensor]:
    """The new values of statistics over all replicas: what these add to those that are declared as
    sums, the weighted means of other floats; the rest as they are."""
    if context.collectives is None:
        return new
    kinds = [aggregation_of(variable) for variable in variables]
    new = _summed(context, [i for i, kind in enumerate(kinds) if kind == "sum"], old, new)
    floats = [i for i, value in enumerate(new) if value.dtype.is_floating and kinds[i] != "sum"]
    if not floats:
        return new
    # The weights of the local batches of one update add up to 1, those of one alone need not.
    widest = max((new[i].dtype for i in floats), key=lambda dtype: dtype.size)
    each = [*(new[i] for i in floats), tf.ones([], widest)]
    *sums, weight = context.collectives.reduce(each, context.weight, context.order)
    for i, total in zip(floats, sums, strict=True):
        new[i] = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
    return new


def _summed(
    context: StepContext, places: list[int], old: list[tf.Tensor], new: list[tf.Tensor]
) -> list[tf.Tensor]:
    """`new` values, at `places` the old ones and what all replicas have added to them."""
    if not places:
        return new
    ours = [old[i] for i in places], [new[i] for i in places]
    every = over_all_ranks(context, ["sum"] * len(places), *ours)
    for i, more in zip(places, every, strict=True):
        new[i] = tf.cast(tf.cast(old[i], tf.float64) + more, new[i].dtype)
    return new


def _mean(values: list[Any], weights: Sequence[tf.Tensor]) -> Any:
    """The weighted mean of structures of numbers; what is no number is the first one's."""
    total = tf.add_n(list(weights))

    def mean(*parts: Any) -> Any:
        if not all(isinstance(p, (tf.Tensor, int, float, np.ndarray, np.generic)) for p in parts):
            return parts[0]
        numbers = [tf.convert_to_tensor(part) for part in parts]
        if numbers[0].dtype.is_integer:
            numbers = [tf.cast(number, tf.float64) for number in numbers]
        if not numbers[0].dtype.is_floating:
            return parts[0]
        scaled = [
            tf.math.multiply_no_nan(number, tf.cast(w, number.dtype))
            for number, w in zip(numbers, weights, strict=True)
        ]
        return tf.math.divide_no_nan(tf.add_n(scaled), tf.cast(total, numbers[0].dtype))

    return keras.tree.map_structure(mean, *values)


def _unless(bad: tf.Tensor, value: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.where(bad, tf.cast(other, value.dtype), value)
