"""An update in parts: compute each share's gradients, add them up, reduce once, apply once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.errors import ModelError
from ktrainer.steps.context import StepContext
from ktrainer.steps.guard import Before
from ktrainer.steps.logged import LoggedResults
from ktrainer.steps.model_step import (
    ShareLike,
    average_statistics,
    is_uniform,
    python_step,
    rows_of,
)
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.options import StepOptions
from ktrainer.steps.seams import seams
from ktrainer.steps.threads import replaced_in
from ktrainer.world.plane import GradientPlane, InOrder, weighted

_SLICES = object()  # marks a gradient that is an IndexedSlices


class CapturedUpdate:
    """Updates of `model` from several shares, or from one compiled with XLA.

    The denominators of masked losses must be known before the first backward pass. They are
    counted by a function of its own, traced from the same step without touching any state, in
    which TensorFlow prunes everything but what leads to the masks.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        plane: GradientPlane | None,
        rank: int,
        uniform: bool | None = None,
        logged: LoggedResults | None = None,
    ) -> None:
        self.model, self.options, self.plane, self.rank = model, options, plane, rank
        self._uniform = uniform  # of all the data: one batch alone may be of one length
        self._logged = logged or LoggedResults(model)
        self._optimizer: Any = None
        self._variables: list[Any] = []
        self._sums: list[Any] = []
        self._assigned: dict[int, Any] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, shares: Sequence[ShareLike]) -> Any:
        """One update; returns the logs of its last share."""
        before = Before(self.model) if self.options.guard is not None else None
        examples = sum(share.global_examples for share in shares)
        weights = [np.float64(share.examples / max(examples, 1)) for share in shares]
        denominators = self._count(shares, weights)
        rows = []
        for share, weight in zip(shares, weights, strict=True):
            compute = self._compiled("compute", share.examples == 0)
            logs, sparse = compute(share.batch, weight, denominators)
            rows.append(sparse)
        columns = [list(column) for column in zip(*rows, strict=True)]
        slices = [tf.concat(column, 0) for column in columns]
        weight, loss = np.float64(sum(weights)), tf.zeros([], tf.float64)
        if before is not None:
            loss = tf.math.multiply_no_nan(before.loss(), weight)
        bad = self._compiled("update", False)(weight, slices, loss)
        if before is not None and bad is not None:
            before.put_back(bad, self._assigned)
            logs = before.logs(bad, logs, self._logged)
        return logs

    def _count(self, shares: Sequence[ShareLike], weights: list[np.float64]) -> Any:
        """Each loss's denominator, summed over the update's shares on all ranks."""
        count = self._compiled("count", False)
        counts = [count(s.batch, w) for s, w in zip(shares, weights, strict=True)]
        local = tf.add_n(counts)
        if self.plane is None or local.shape[0] == 0:
            return local
        return self._compiled("sum", False)(local)

    def _compiled(self, kind: str, blank: bool) -> Callable[..., Any]:
        key = (kind, blank)
        if key not in self._functions:
            function = {
                "count": self._record,
                "sum": self._sum,
                "compute": lambda b, w, d: self._compute(b, w, d, blank),
                "update": self._update,
            }[kind]
            self._functions[key] = tf.function(
                function,
                jit_compile=(kind == "compute" and self.options.xla) or None,
                reduce_retracing=True,
                autograph=False,
            )
        return self._functions[key]

    def _record(self, batch: Any, weight: tf.Tensor) -> tf.Tensor:
        context = StepContext(
            weight,
            self.plane,
            self.rank,
            uniform=is_uniform(batch) if self._uniform is None else self._uniform,
            denominators=[],
            record=True,
            capture=True,
            xla=self.options.xla,
            rows=rows_of(batch),
        )
        no_penalties = (keras.layers.Layer, "_get_regularization_losses", _no_penalties)
        with (
            _Counting(),
            seams(context, optimizers_of(self.model)),
            replaced_in(context, [no_penalties]),
        ):
            self._step(batch)
        counted = context.denominators or []
        return tf.stack(counted) if counted else tf.zeros([0], tf.float64)

    def _sum(self, local: tf.Tensor) -> tf.Tensor:
        assert self.plane is not None
        return self.plane.sum(local, InOrder())

    def _compute(self, batch: Any, weight: tf.Tensor, denominators: Any, blank: bool) -> Any:
        context = StepContext(
            weight,
            self.plane,
            self.rank,
            uniform=is_uniform(batch) if self._uniform is None else self._uniform,
            denominators=tf.unstack(denominators),
            capture=True,
            xla=self.options.xla,
            rows=rows_of(batch),
        )
        kept = [(v, tf.identity(v)) for v in self.model.metrics_variables] if blank else []
        with seams(context, optimizers_of(self.model)), self._logged.recording():
            logs = self._logged.noting(self._step)(batch)
        sparse = self._add(context)
        for variable, value in kept:
            variable.assign(value)
        return logs, sparse

    def _step(self, batch: Any) -> Any:
        return python_step(self.model.train_step)(batch)

    def _add(self, context: StepContext) -> list[tf.Tensor]:
        """Add this share's weighted dense gradients to the sums; return its sparse ones.

        Slices stay slices, repeated indices apart: Keras' adaptive optimizers square each slice
        on its own, so that summing them first would give other numbers than one big batch.
        """
        optimizer, gradients, variables = one_capture(context, self.model)
        if self._optimizer is None:
            self._optimizer, self._variables = optimizer, variables
            with tf.init_scope():
                self._sums = [_zeros(g, v) for g, v in zip(gradients, variables, strict=True)]
        self._assigned.update(context.assigned)
        sparse = []
        for total, gradient in zip(self._sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                sparse += [weighted(gradient.values, context.weight), gradient.indices]
            elif total is not None:
                total.assign_add(weighted(gradient, context.weight))
        return sparse

    def _update(
        self, weight: tf.Tensor, slices: list[tf.Tensor], loss: tf.Tensor
    ) -> tf.Tensor | None:
        size = self.plane.size if self.plane is not None and not self.options.average else 1
        context = StepContext(
            weight,
            self.plane,
            self.rank,
            hooks=self.options.all_hooks(),
            gradient_weight=tf.constant(size, tf.float64),
            guard=self.options.guard,
            times=size,
            loss=(lambda: loss) if self.options.guard is not None else None,
        )
        with seams(context, [self._optimizer]):
            self._optimizer.apply(self._gradients(iter(slices)), self._variables)
        context.assigned = self._assigned
        average_statistics(context, self.model)
        self.abandon()
        return context.bad

    def abandon(self) -> None:
        """Begin to add up anew."""
        for total in self._sums:
            if isinstance(total, tf.Variable):
                total.assign(tf.zeros_like(total))

    def _gradients(self, slices: Iterator[tf.Tensor]) -> list[Any]:
        """The summed gradients of all variables, in order."""
        gradients: list[Any] = []
        for total, variable in zip(self._sums, self._variables, strict=True):
            if total is _SLICES:
                shape = tf.constant(tuple(variable.shape), tf.int64)
                gradients.append(tf.IndexedSlices(next(slices), next(slices), shape))
            else:
                gradients.append(None if total is None else tf.identity(total))
        return gradients


class _Counting(keras.StatelessScope):
    """Keeps what is assigned, but to weights: they are differentiated by, where they are."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        if not update[0].trainable:
            super().add_update(update)


def one_capture(context: StepContext, model: keras.Model) -> tuple[Any, list[Any], list[Any]]:
    """The optimizer that a step applied, its gradients and variables.

    Raises:
        ModelError: the step applied none, or several.
    """
    if len(context.captured) != 1:
        raise ModelError(
            f"{type(model).__name__}.train_step applies {len(context.captured)} optimizers; "
            "trainer.accumulate > 1, and trainer.xla with several ranks, need a step that applies "
            "exactly one, once. Set trainer.accumulate=1 and trainer.xla=false."
        )
    return context.captured[0]


def _no_penalties(layer: Any) -> list[tf.Tensor]:
    """Zeros in place of a layer's regularisation losses: they have no denominator, and Keras
    cannot compute them in a scope that does not hold the weights' values."""
    regularised = any(v.regularizer is not None for v in layer.trainable_variables)
    return [tf.zeros((), keras.config.floatx())] if regularised else []


def _zeros(gradient: Any, variable: Any) -> Any:
    """Where a variable's gradients are summed up; None if it has none."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return _SLICES
    return tf.Variable(tf.zeros(variable.shape, gradient.dtype))
