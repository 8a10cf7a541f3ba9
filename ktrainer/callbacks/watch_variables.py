"""Base of callbacks that measure each variable's gradient, value and update every so often.

Events used: `on_train_begin`, `on_step_begin` (keep the weights), `on_gradients` (measure
gradients), `on_step_end` (measure weights), `on_restore` and `on_heal`.

All of it is computed at the updates that are due. In between, the compiled step tests one boolean.
Replicas hold equal values; under a pipeline each stage has its own, which all ranks then exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ktrainer.callbacks.base import Callback
from ktrainer.state.durations import Every
from ktrainer.state.progress import Progress
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.named_variables import INTERNAL
from ktrainer.steps.variable_placement import placement_of

# In place of numbers of what is not there, or not in this process.
ABSENT = float(np.finfo(np.float64).min)


class VariableWatch(Callback, ABC):
    """Measures the trainable variables, but for those of local layers, at updates that are due.

    Gradients are those of the whole batch, as summed over ranks, before clipping and before
    callbacks change them.

    Args:
        every: how often, for example `"100ba"`.

    Attributes:
        of_gradient, of_weight: how many numbers are measured of each.
        variables: those that are measured.
    """

    of_gradient: int
    of_weight: int

    def __init__(self, every: str) -> None:
        super().__init__()
        self.every = Every(every)
        self.variables: list[Any] = []
        self._places: dict[int, int] = {}  # by id() of the variable
        self._gradients: Any = None  # numbers of gradients, assigned in the step
        self._wanted: Any = None  # whether the step measures them
        self._read: Callable[[], list[Any]] | None = None
        self._measure: Callable[..., Any] | None = None
        self._before: list[Any] | None = None  # weights, as they were before the update

    # -- what a subclass measures

    @abstractmethod
    def measure_gradient(self, gradient: Any) -> tf.Tensor:
        """The numbers of a gradient, float64, none of which is `ABSENT`; a dense tensor, or an
        IndexedSlices."""

    @abstractmethod
    def measure_weight(self, before: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
        """The numbers of a weight and its update, float64, none of which is `ABSENT`."""

    @abstractmethod
    def use(self, gradients: np.ndarray, weights: np.ndarray) -> None:
        """Take the numbers of an update: a row for each of `variables`, on all ranks; `ABSENT`
        where there is no gradient."""

    # -- the step

    def set_model(self, model: Any) -> None:
        """Make what the step asks, before it is traced."""
        super().set_model(model)
        if self._wanted is None:
            self._wanted = tf.Variable(False, trainable=False, name=INTERNAL)

    def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        self._find_variables()
        found = [
            (self._places[id(v)], g)
            for g, v in zip(gradients, variables, strict=True)
            if g is not None and id(v) in self._places
        ]
        if found:
            tf.cond(self._wanted, lambda: self._assign(found), lambda: tf.constant(0))
        return gradients

    def _assign(self, found: list[tuple[int, Any]]) -> tf.Tensor:
        places = [[place] for place, _ in found]
        numbers = tf.stack([self.measure_gradient(g) for _, g in found])
        self._gradients.scatter_nd_update(places, numbers)
        return tf.constant(0)

    def _find_variables(self) -> None:
        """Number the variables; at the first trace, when all are there."""
        if self._gradients is not None:
            return
        local = local_variables(self.model)
        self.variables = [v for v in self.model.trainable_variables if id(v) not in local]
        self._places = {id(v): i for i, v in enumerate(self.variables)}
        with tf.init_scope():
            absent = np.full([max(1, len(self.variables)), self.of_gradient], ABSENT)
            self._gradients = tf.Variable(absent, False, name=INTERNAL, dtype=tf.float64)

    # -- events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.every.steps_per_epoch = self.steps_per_epoch
        self.every.start(self.progress)
        self._before = None

    def max_updates_per_call(self) -> int | None:
        due = self.every.updates_until_due(self.progress)
        assert due is not None
        return max(1, due - 1)  # the update that is due is a call of its own

    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        if self.every.updates_until_due(self.progress) != 1:
            return
        self._find_variables()
        self._wanted.assign(True)
        self._gradients.assign(tf.fill(self._gradients.shape, tf.constant(ABSENT, tf.float64)))
        self._compile()
        assert self._read is not None
        self._before = self._read()

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self.every.due(self.progress):
            return
        before, self._before = self._before, None
        if before is None:  # ranks have failed or joined since
            return
        self._wanted.assign(False)
        assert self._measure is not None
        gradients = self._gradients.numpy()[: len(self.variables)]
        found = np.concatenate([gradients, self._measure(before).numpy()], axis=1)
        if placement_of(self.model) is not None:
            for part in self.world.allgather(found, "measures of all stages"):
                found = np.where(found == ABSENT, part, found)  # copies are equal
        self.use(found[:, : self.of_gradient], found[:, self.of_gradient :])

    def on_restore(self, progress: Progress) -> None:
        self.every.start(progress)
        self._before = None

    def on_heal(self, progress: Progress) -> None:
        self.every.heal(progress)

    def _compile(self) -> None:
        """Make the functions that read and measure the weights that are in this process."""
        if self._read is not None:
            return
        placement, count = placement_of(self.model), len(self.variables)
        here = [
            (i, v) for i, v in enumerate(self.variables) if placement is None or placement.holds(v)
        ]
        places, variables = [[i] for i, _ in here], [v for _, v in here]

        def measure(before: list[Any]) -> Any:
            now = [tf.convert_to_tensor(v) for v in variables]
            rows = [self.measure_weight(b, n) for b, n in zip(before, now, strict=True)]
            absent = tf.fill([count, self.of_weight], tf.constant(ABSENT, tf.float64))
            return tf.tensor_scatter_nd_update(absent, places, rows) if rows else absent

        self._read = tf.function(
            lambda: [tf.identity(tf.convert_to_tensor(v)) for v in variables], autograph=False
        )
        self._measure = tf.function(measure, autograph=False)


def whole(gradient: Any) -> tf.Tensor:
    """A gradient of at least float32, as squares of 16 bits overflow; of an IndexedSlices the rows
    that it has, those of the same index added up."""
    if isinstance(gradient, tf.IndexedSlices):
        places, index = tf.unique(gradient.indices)
        values = wide(gradient.values)
        return tf.math.unsorted_segment_sum(values, index, tf.size(places))
    return wide(gradient)


def wide(value: tf.Tensor) -> tf.Tensor:
    """At least float32."""
    return tf.cast(value, tf.float32) if value.dtype.size < 4 else value
