"""What comes out of a step on several replicas: one set of logs, one batch of outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.feed.datasets import graph_bounds


def joined_logs(
    model: keras.Model | None, logs: Sequence[Any], weights: Sequence[tf.Tensor]
) -> Any:
    """The logs of all replicas: of metrics their results, of the rest the weighted mean.

    Args:
        model: whose metrics have counted all replicas' outputs; None: they are counted later.
        logs: what the step returned on each replica.
        weights: each replica's part of the update.
    """
    first = logs[0]
    if not isinstance(first, Mapping):
        return _mean(list(logs), weights)
    results = model.get_metrics_result() if model is not None and model.metrics else {}
    return {
        key: results[key] if key in results else _mean([log[key] for log in logs], weights)
        for key in first
    }


def joined_outputs(outputs: Sequence[Any], rows: tf.Tensor) -> Any:
    """The outputs of all replicas of a process in the order of its rows, without stand-ins.

    Args:
        outputs: nested tensors, for each replica.
        rows: int64 scalar; how many true rows they have together.
    """
    count = len(outputs)

    def join(*parts: Any) -> Any:
        kept = [part[: graph_bounds(rows, i, count)[1]] for i, part in enumerate(parts)]
        return kept[0] if count == 1 else tf.concat(kept, 0)

    return keras.tree.map_structure(join, *outputs)


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
