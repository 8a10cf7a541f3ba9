"""An update that accumulates several local batches on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.distributed.collectives import GradientCollectives, InOrder
from ktrainer.runtime.monkeypatching import replaced_in
from ktrainer.steps.compiled_step import CompiledStep, graphs_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.local_layers import local_variables
from ktrainer.steps.metric_logs import LoggedResults
from ktrainer.steps.metric_states import warn_of_unlisted
from ktrainer.steps.named_variables import INTERNAL
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.powersgd import powersgd_of
from ktrainer.steps.program_interface import LocalBatchLike
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.step_helpers import (
    average_statistics,
    is_uniform,
    moved_by_padding,
    python_step,
    rows_of,
    statistics_of_own_rows,
    summed_statistics,
    unmoved,
)
from ktrainer.steps.step_options import StepOptions
from ktrainer.steps.update_guard import StateBeforeStep
from ktrainer.steps.update_in_parts import (
    GradientParts,
    Tensors,
    UpdateInParts,
    count_denominators,
)
from ktrainer.steps.xla_segments import compile_segments

_SCALAR = tf.TensorSpec([], tf.float64)


class AccumulatedUpdate(UpdateInParts[LocalBatchLike]):
    """Updates of `model` from several local batches.

    What has the same shape in all of them is added up in place, in the function that computes it.
    The last one's backward pass and the sums over ranks are one function, so that they overlap.

    Args:
        spec: of local batches, their number of rows unknown.
        logged: which of the step's logs are metrics' results.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        collectives: GradientCollectives | None,
        rank: int,
        spec: Any,
        logged: LoggedResults,
    ) -> None:
        self.model, self.options, self.collectives, self.rank = model, options, collectives, rank
        self._spec = spec  # of all the data: one batch alone may be of one length
        self._logged = logged
        self._gradients = GradientParts(model)
        self._sums: list[tf.Variable | None] = []
        self._assigned: dict[int, Any] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._before: StateBeforeStep | None = None
        self._examples = 1

    def __call__(self, local_batches: Sequence[LocalBatchLike]) -> Any:
        """One update; returns the logs of its last local batch."""
        self._before = StateBeforeStep(self.model) if self.options.guard is not None else None
        self._examples = max(sum(part.global_examples for part in local_batches), 1)
        return super().__call__(local_batches)

    def count(self, part: LocalBatchLike) -> tf.Tensor:
        count = self._function("count", self._count, self._spec, _SCALAR)
        return count(part.batch, self._weight(part))

    def reduce_denominators(self, denominators: tf.Tensor) -> tf.Tensor:
        if self.collectives is None:
            return denominators
        return self._function("sum", self._sum)(denominators)

    def compute(self, part: LocalBatchLike, denominators: tf.Tensor) -> tuple[Any, list[Tensors]]:
        padding = part.examples == 0
        compute = self._function(
            f"compute, {padding}",
            lambda batch, weight, counted: self._compute(batch, weight, counted, padding),
            self._spec,
            _SCALAR,
            tf.TensorSpec(denominators.shape, tf.float64),
            xla=self.options.xla,
        )
        logs, rest = compute(part.batch, self._weight(part), denominators)
        return logs, [rest]

    def add(self, total: list[Tensors], more: list[Tensors]) -> list[Tensors]:
        return total + more  # concatenated once, before they are applied

    def finish(
        self,
        parts: Sequence[LocalBatchLike],
        denominators: tf.Tensor,
        total: list[Tensors] | None,
    ) -> Any:
        if self.collectives is None or total is None or self._before is not None:
            return super().finish(parts, denominators, total)
        last, slices = parts[-1], _columns(total)
        padding = last.examples == 0

        def finish(batch: Any, weight: tf.Tensor, counted: tf.Tensor, *rest: Any) -> Any:
            return self._finish(batch, weight, counted, padding, *rest)

        function = self._function(
            f"finish, {padding}",
            compile_segments(finish) if self.options.xla else finish,
            self._spec,
            _SCALAR,
            tf.TensorSpec(denominators.shape, tf.float64),
            _SCALAR,
            tf.nest.map_structure(_of_any_length, slices),
        )
        weights = self._weight(last), np.float64(sum(self._weight(part) for part in parts))
        return function(last.batch, weights[0], denominators, weights[1], slices)

    def apply(self, parts: Sequence[LocalBatchLike], total: list[Tensors], logs: Any) -> Any:
        weight = np.float64(sum(self._weight(part) for part in parts))
        before, loss = self._before, tf.zeros([], tf.float64)
        if before is not None:
            loss = tf.math.multiply_no_nan(before.loss(), weight)
        bad = self._function("update", self._update)(weight, _columns(total), loss)
        if before is not None and bad is not None:
            before.restore(bad, self._assigned)
            logs = before.logs(bad, logs, self._logged)
        return logs

    @property
    def graphs(self) -> list[Any]:
        """Those of its compiled functions, as far as they are traced."""
        return graphs_of(self._functions.values())

    def abandon(self) -> None:
        """Set all sums to zero."""
        for total in self._sums:
            if total is not None:
                total.assign(tf.zeros_like(total))

    def _weight(self, part: LocalBatchLike) -> np.float64:
        return np.float64(part.examples / self._examples)

    def _function(
        self, name: str, function: Callable[..., Any], *specs: Any, xla: bool = False
    ) -> Callable[..., Any]:
        """`function`, compiled at first use, for `specs` if there is one of local batches: what
        depends on the number of rows must not look like a constant."""
        if name not in self._functions:
            known = specs if self._spec is not None else ()
            self._functions[name] = CompiledStep(function, *known, xla=xla)
        return self._functions[name]

    def _context(self, batch: Any, weight: tf.Tensor, **settings: Any) -> StepContext:
        return StepContext(
            weight,
            self.collectives,
            self.rank,
            uniform=is_uniform(batch if self._spec is None else self._spec),
            capture=True,
            xla=self.options.xla,
            rows=rows_of(batch),
            **settings,
        )

    def _step(self, batch: Any) -> Any:
        return python_step(self.model.train_step)(batch)

    def _count(self, batch: Any, weight: tf.Tensor) -> tf.Tensor:
        context = self._context(batch, weight, denominators=[], record=True)
        no_penalties = (keras.layers.Layer, "_get_regularization_losses", _no_penalties)
        with (
            _Counting(),
            keras_patches(context, optimizers_of(self.model)),
            replaced_in(context, [no_penalties]),
        ):
            return count_denominators(context, lambda: self._step(batch))

    def _sum(self, denominators: tf.Tensor) -> tf.Tensor:
        assert self.collectives is not None
        return self.collectives.sum(denominators, InOrder())

    def _compute(
        self, batch: Any, weight: tf.Tensor, denominators: tf.Tensor, padding: bool
    ) -> tuple[Any, Tensors]:
        logs, parts = self._gradients_of(batch, weight, denominators, padding)
        return logs, self._add_in_place(parts)

    def _gradients_of(
        self, batch: Any, weight: tf.Tensor, denominators: tf.Tensor, padding: bool
    ) -> tuple[Any, Tensors]:
        """The logs of a local batch, and its weighted gradients."""
        context = self._context(batch, weight, denominators=tf.unstack(denominators))
        kept: list[Any] = []
        if padding:  # statistics too: the weight of their average is that of all parts, and not 0
            kept = [*moved_by_padding(self.model), *statistics_of_own_rows(self.model)]
        with unmoved(kept, context.assigned):
            with (
                keras_patches(context, optimizers_of(self.model)),
                self._logged.recording(),
                summed_statistics(context, self.model),
            ):
                logs = self._logged.noting(self._step, context)(batch)
            parts = self._gradients.take(context)
        if self.collectives is not None:
            warn_of_unlisted(self.model, context.assigned)
        self._assigned.update(context.assigned)
        return logs, parts

    def _finish(
        self,
        batch: Any,
        weight: tf.Tensor,
        denominators: tf.Tensor,
        padding: bool,
        whole: tf.Tensor,
        slices: Tensors,
    ) -> Any:
        """Compute the last local batch and apply the update.

        Args:
            whole: the weight of all local batches.
            slices: of the gradients of the others.
        """
        logs, parts = self._gradients_of(batch, weight, denominators, padding)
        sums, rest = [], []
        for total, tensors, others in zip(self._sums, parts, slices, strict=True):
            sums.append([] if total is None else [total + tensors[0]])
            mine = tensors if total is None else tensors[1:]
            rest.append(_concatenated([others, mine]))
        self._apply(whole, sums, rest, tf.zeros([], tf.float64))
        return logs

    def _add_in_place(self, parts: Tensors) -> Tensors:
        """Add what has one shape to the sums; returns the rest: slices, or indices alone."""
        if not self._sums:
            kinds, variables = self._gradients.kinds, self._gradients.variables
            with tf.init_scope():
                self._sums = [_zeros(*each) for each in zip(kinds, parts, variables, strict=True)]
        rest = []
        for total, tensors in zip(self._sums, parts, strict=True):
            if total is not None:
                total.assign_add(tensors[0])
            rest.append(tensors if total is None else tensors[1:])
        return rest

    def _update(self, weight: tf.Tensor, rest: Tensors, loss: tf.Tensor) -> tf.Tensor | None:
        sums = [[] if total is None else [tf.identity(total)] for total in self._sums]
        return self._apply(weight, sums, rest, loss)

    def _apply(
        self, weight: tf.Tensor, sums: Tensors, rest: Tensors, loss: tf.Tensor
    ) -> tf.Tensor | None:
        """Sum gradients over ranks, and apply them; returns what the guard has found."""
        times = 1
        if self.collectives is not None and not self.options.average:
            times = self.collectives.size
        context = StepContext(
            weight,
            self.collectives,
            self.rank,
            hooks=self.options.all_hooks(),
            gradient_weight=tf.constant(times, tf.float64),
            guard=self.options.guard,
            times=times,
            loss=(lambda: loss) if self.options.guard is not None else None,
            local=local_variables(self.model),
            powersgd=powersgd_of(self.model),
        )
        gradients = self._gradients.whole([a + b for a, b in zip(sums, rest, strict=True)])
        optimizer, variables = self._gradients.optimizer, self._gradients.variables
        with keras_patches(context, [optimizer]):
            optimizer.apply(gradients, variables)
        context.assigned = self._assigned
        average_statistics(context, self.model)
        self.abandon()
        return context.bad


class _Counting(keras.StatelessScope):
    """Keeps what is assigned, but to weights: they are differentiated by, where they are."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        if not update[0].trainable:
            super().add_update(update)


def _no_penalties(layer: Any) -> list[tf.Tensor]:
    """Zeros in place of a layer's regularisation losses: they have no denominator, and Keras
    cannot compute them in a scope that does not hold the weights' values."""
    regularised = any(v.regularizer is not None for v in layer.trainable_variables)
    return [tf.zeros((), keras.config.floatx())] if regularised else []


def _zeros(kind: type | None, tensors: Sequence[tf.Tensor], variable: Any) -> tf.Variable | None:
    """A variable to add up gradients in; None if they have no common shape, or there are none."""
    if kind is None or kind is tf.IndexedSlices:
        return None
    shape = variable.shape if kind is tf.Tensor else tensors[0].shape
    return tf.Variable(
        tf.zeros(shape, tensors[0].dtype),
        trainable=False,
        name=INTERNAL,
        experimental_enable_variable_lifting=False,  # else what is being traced is traced again
    )


def _columns(total: Sequence[Tensors]) -> Tensors:
    """The slices of each variable in several parts."""
    return [_concatenated(column) for column in zip(*total, strict=True)]


def _of_any_length(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def _concatenated(parts: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """The slices of one variable in all parts; indices alone are the same in each."""
    if len(parts[0]) < 2:
        return list(parts[0])
    return [tf.concat(column, 0) for column in zip(*parts, strict=True)]
