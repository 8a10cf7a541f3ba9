"""Histograms of weights and gradients in TensorBoard.

Events used: those of `VariableWatch`, `close`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.callbacks.tensorboard import TENSORS, write_summary
from ktrainer.callbacks.watch_variables import ABSENT, VariableWatch, whole, wide
from ktrainer.state.progress import Progress

_BUCKETS = 30  # as tf.summary.histogram has


class TensorBoardHistograms(VariableWatch):
    """Write histograms of each weight after the update, and of its gradient, by rank 0.

    Values that are not finite are left out.

    Args:
        every: how often, for example `"1000ba"`.
    """

    of_gradient = of_weight = 2 + _BUCKETS

    def __init__(self, every: str) -> None:
        super().__init__(every)
        self._writer: Any = None

    def measure_gradient(self, gradient: Any) -> tf.Tensor:
        return _histogram(whole(gradient))

    def measure_weight(self, before: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        return _histogram(wide(now))

    def use(self, gradients: np.ndarray, weights: np.ndarray) -> None:
        if not self.world.is_root:
            return
        if self._writer is None:
            folder = self.run_path("tensorboard")
            assert folder is not None
            self._writer = tf.summary.create_file_writer(str(folder / "train"))
        with self._writer.as_default(self.progress.step):
            for kind, rows in (("gradient", gradients), ("weight", weights)):
                for variable, row in zip(self.variables, rows, strict=True):
                    if row[0] != ABSENT:
                        write_summary(f"{kind}/{variable.path}", _table(row), "histograms", TENSORS)
        self._writer.flush()

    def on_restore(self, progress: Progress) -> None:
        super().on_restore(progress)
        self.close()  # TensorBoardLog, which comes later, rewrites the files

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _histogram(value: tf.Tensor) -> tf.Tensor:
    """The smallest and the largest value, and the counts between them, float64."""
    value = tf.cast(value, tf.float64)
    finite = tf.math.is_finite(value)
    any_finite = tf.reduce_any(finite)
    zero, infinite = tf.zeros([], tf.float64), tf.fill(tf.shape(value), np.float64(np.inf))
    low = tf.where(any_finite, tf.reduce_min(tf.where(finite, value, infinite)), zero)
    high = tf.where(any_finite, tf.reduce_max(tf.where(finite, value, -infinite)), zero)
    high = tf.where(high > low, high, low + tf.maximum(tf.abs(low), 1.0) * 1e-6)
    share = tf.where(finite, (value - low) / (high - low), tf.zeros_like(value))
    bucket = tf.minimum(tf.cast(share * _BUCKETS, tf.int32), _BUCKETS - 1)
    counts = tf.math.unsorted_segment_sum(tf.cast(finite, tf.float64), bucket, _BUCKETS)
    return tf.concat([[low, high], counts], 0)


def _table(row: np.ndarray) -> np.ndarray:
    """(left, right, count) of each bucket."""
    edges = np.linspace(row[0], row[1], _BUCKETS + 1)
    return np.stack([edges[:-1], edges[1:], row[2:]], axis=1)
