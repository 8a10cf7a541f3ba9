"""Norms of gradients, weights and updates in the rows of logs.

Events used, besides those of `VariableWatch`: `on_step_end` (whether a row is due), `on_log` (add
the norms).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.callbacks.watch_variables import ABSENT, VariableWatch, whole, wide
from ktrainer.state.progress import Progress


class NormWatch(VariableWatch):
    """Log `norm/gradient`, `norm/weight` and `norm/update_ratio` at every update that is due.

    Weights are those after the update; the ratio is the norm of their change over their norm
    before. An update that is skipped has no gradient norm.

    Args:
        every: how often, for example `"100ba"`.
        layers: the same for each layer, as `norm/gradient/LAYER`.
    """

    of_gradient = 1
    of_weight = 3

    def __init__(self, every: str, layers: bool = False) -> None:
        super().__init__(every)
        self.layers = layers
        self._values: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._values = {}

    def max_updates_per_call(self) -> int | None:
        return super().max_updates_per_call()

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        super().on_step_end(step, logs)
        # Alike on all ranks, also on one that has joined within this update.
        self.train_state.log_due = self.train_state.log_due or self.every.fired_at(step)

    def on_log(self, step: int, logs: Mapping[str, float]) -> None:
        values, self._values = self._values, {}
        if isinstance(logs, dict):
            logs.update(values)

    def on_restore(self, progress: Progress) -> None:
        super().on_restore(progress)
        self._values, self.train_state.log_due = {}, False

    def measure_gradient(self, gradient: Any) -> tf.Tensor:
        return _square(whole(gradient))[None]

    def measure_weight(self, before: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        before, now = wide(before), wide(now)
        return tf.stack([_square(now), _square(before), _square(now - before)])

    def use(self, gradients: np.ndarray, weights: np.ndarray) -> None:
        self._values = _norms(gradients, weights, "")
        if not self.layers:
            return
        layers: dict[str, list[int]] = {}
        for i, variable in enumerate(self.variables):
            path = variable.path.removeprefix(f"{self.model.name}/")
            layers.setdefault(path.rpartition("/")[0] or path, []).append(i)
        for layer, places in layers.items():
            self._values |= _norms(gradients[places], weights[places], f"/{layer}")


def _norms(gradients: np.ndarray, weights: np.ndarray, ending: str) -> dict[str, float]:
    """The norms of some variables together; none of gradients where there are no gradients."""
    weight, before, change = (_root(column) for column in weights.T)
    found = {}
    if (gradients != ABSENT).any():
        found[f"norm/gradient{ending}"] = _root(gradients)
    found[f"norm/weight{ending}"] = weight
    if before > 0:
        found[f"norm/update_ratio{ending}"] = change / before
    return found


def _root(squares: np.ndarray) -> float:
    return float(np.sqrt(squares[squares != ABSENT].sum()))


def _square(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.reduce_sum(tf.square(value)), tf.float64)
