"""Skips updates that would spoil a model, inside the compiled step, on all ranks alike.

The loss of a local batch travels with its gradients, as one number more in the same all-reduce;
what comes back is the same on every rank, so all decide alike, without waiting for the host. When
an update is skipped, weights and slots are not touched, and statistics and metrics, which the
forward pass has moved by then, are restored. Random numbers that were drawn stay drawn.

A `LossScaleOptimizer` skips updates by itself when scaled gradients overflow, and halves its
scale, on all ranks too. That is no fault and not counted; a loss that is not finite is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.state.nested_logs import flatten_paths, unflatten_paths
from ktrainer.steps.metric_logs import LoggedResults
from ktrainer.steps.named_variables import INTERNAL
from ktrainer.steps.variable_assignments import aggregation_of


class UpdateGuard:
    """The rule by which updates are skipped, and counts of those that were.

    Args:
        finite: skip updates whose loss or gradients are not finite.

    Attributes:
        limit: float64 scalar; updates with a loss above it are skipped; infinity for none.
        loss: float64 scalar; of the last update, over all ranks.
        skipped_in_a_row: int64 scalar; updates skipped in a row, up to the last one.
        skipped: int64 scalar; updates skipped since it was made, or since the last look at them
            before the state that was restored.
    """

    def __init__(self, finite: bool) -> None:
        self.finite = finite
        self.limit = _scalar(np.inf, tf.float64)
        self.loss = _scalar(0.0, tf.float64)
        self.skipped_in_a_row = _scalar(0, tf.int64)
        self.skipped = _scalar(0, tf.int64)

    def is_bad(self, loss: tf.Tensor, gradients: Sequence[Any], optimizer: Any) -> tf.Tensor:
        """Return whether an update is to be skipped.

        Args:
            loss: float64 scalar, over all ranks.
            gradients: summed over all ranks.
            optimizer: what is to apply them.
        """
        bad = loss > self.limit
        if self.finite:
            bad |= ~tf.math.is_finite(loss)
            if not scales_loss(optimizer):
                bad |= ~all_finite(gradients)
        return bad

    def is_spike(self) -> bool:
        """Return whether the loss of the last update is above the limit."""
        return bool(self.loss > self.limit)

    def note(self, bad: tf.Tensor, loss: tf.Tensor) -> None:
        """Keep the loss of an update, and count it if it is skipped."""
        self.loss.assign(loss)
        self.skipped_in_a_row.assign(
            tf.where(bad, self.skipped_in_a_row + 1, tf.zeros_like(self.skipped_in_a_row))
        )
        self.skipped.assign_add(tf.cast(bad, tf.int64))

    def unless_bad(
        self, bad: tf.Tensor, loss: tf.Tensor, optimizer: Any, apply: Callable[[], Any]
    ) -> None:
        """`apply()`, or nothing for an update that is skipped."""
        self.note(bad, loss)
        skipped = self.is_skipped(bad, loss, optimizer)
        done = tf.constant(0)

        def applied() -> tf.Tensor:
            apply()
            return tf.constant(0)

        tf.cond(skipped, lambda: done, applied)

    def is_skipped(self, bad: tf.Tensor, loss: tf.Tensor, optimizer: Any) -> tf.Tensor:
        """Return whether `optimizer` is not to apply an update that is `bad`."""
        # One that scales the loss finds by itself what is not finite, and halves the scale.
        return loss > self.limit if scales_loss(optimizer) else bad


class StateBeforeStep:
    """The variables that a step moves in its forward pass, as they were before.

    Args:
        model: whose step begins.
    """

    def __init__(self, model: keras.Model) -> None:
        statistics = [
            v
            for v in model.non_trainable_variables
            if tf.as_dtype(v.dtype).is_floating or aggregation_of(v) == "sum"
        ]
        metrics = model.metrics_variables
        own = {id(v) for v in metrics}
        kept = [*metrics, *(v for v in statistics if id(v) not in own)]
        self._kept = [(v, tf.identity(v.value)) for v in kept]
        self.loss = LossOfStep(model)

    def restore(self, bad: tf.Tensor, assigned: Mapping[int, Any]) -> None:
        """Undo what a step has moved, if it is `bad`.

        Args:
            assigned: the variables that it may have moved, by `id()`.
        """
        for variable, value in self._kept:
            if id(variable) in assigned:
                variable.assign(tf.where(bad, value, variable.value))

    def logs(self, bad: tf.Tensor, logs: Any, logged: LoggedResults) -> Any:
        """A step's logs; those of metrics as `restore` has left them, if it is `bad`."""
        if not isinstance(logs, dict):
            return logs
        again, values = logged.now(logs), flatten_paths(logs)
        restore = {path: tf.where(bad, value, values[path]) for path, value in again.items()}
        return unflatten_paths(logs, {**values, **restore})


class LossOfStep:
    """The mean loss of what is counted from now on, from the metric that Keras' step keeps it in.

    Args:
        model: its metric `loss`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._metric = loss_metric(model)
        self._before = self._counted() if self._metric is not None else None

    def sums(self) -> tuple[tf.Tensor, tf.Tensor]:
        """(sum of losses, number of examples), float64; zeros where there is no such metric."""
        if self._before is None:
            return tf.zeros([], tf.float64), tf.zeros([], tf.float64)
        total, count = self._counted()
        return total - self._before[0], count - self._before[1]

    def __call__(self) -> tf.Tensor:
        """The mean, float64; 0 if nothing was counted."""
        return tf.math.divide_no_nan(*self.sums())

    def _counted(self) -> tuple[tf.Tensor, tf.Tensor]:
        assert self._metric is not None
        states = (self._metric.total, self._metric.count)
        total, count = (tf.identity(tf.cast(state.value, tf.float64)) for state in states)
        return total, count


def loss_metric(model: keras.Model) -> keras.metrics.Mean | None:
    """The metric in which a model's steps keep the epoch's mean loss; None if there is none."""
    for metric in model.metrics:
        if isinstance(metric, keras.metrics.Mean) and metric.name == "loss":
            return metric
    return None


def has_keras_step(model: keras.Model) -> bool:
    """Return whether Keras' own `train_step` trains the model: it counts the loss before it applies
    gradients."""
    return type(model).train_step is keras.Model.train_step


def check_one_update(applies: int, model: keras.Model) -> None:
    """Refuse a step of several updates: one may be applied before another is found to be bad.

    Raises:
        ModelError: it applies more than one.
    """
    if applies > 1:
        raise ModelError(
            f"{type(model).__name__}.train_step applies optimizers {applies} times, so an update "
            "cannot be left out as a whole, as health.nan=skip and health.on_spike=skip do. Set "
            "them to stop or rollback."
        )


def scales_loss(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether all elements of all gradients are finite."""
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None
    ]
    each = [tf.reduce_all(tf.math.is_finite(v)) for v in values]
    return tf.reduce_all(tf.stack(each)) if each else tf.constant(True)


def _scalar(value: float, dtype: tf.DType) -> tf.Variable:
    return tf.Variable(value, trainable=False, name=INTERNAL, dtype=dtype)
