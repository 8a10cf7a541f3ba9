"""The update of a stage's weights: gradients over replicas, then clipped and applied.

Inside the compiled update stages all-reduce what an optimizer must know of all of them: the
global norm of the gradients, and whether all are finite, so that the loss scale stays the same on
every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from ktrainer.backends.pipeline.placement.moving_averages import held_averages
from ktrainer.backends.pipeline.runtime.model_call import whole
from ktrainer.backends.pipeline.runtime.tied_gradients import joined
from ktrainer.backends.pipeline.stage.gradient_accumulators import GradientAccumulators
from ktrainer.backends.pipeline.stage.gradient_ordering import UpdateOrdering
from ktrainer.distributed.collectives import GradientCollectives, InOrder
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps import StepOptions, optimizers_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.step_helpers import average_statistics
from ktrainer.steps.step_options import GradientHook
from ktrainer.steps.update_guard import all_finite, scales_loss
from ktrainer.steps.variable_assignments import aggregation_of

_GROUP_BYTES = 4 * 2**20


class StageUpdate:
    """Applies the gradients of one stage.

    Args:
        model: the whole model.
        variables: trained ones that are held here.
        owned: `id()` of those that count for the norm here: shared variables count once.
        sums: the gradients.
        options: clipping and hooks.
        stages: sums over the stages of this replica; None for one stage.
        replicas: sums over the copies of this stage; None for one.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[Any],
        owned: Collection[int],
        sums: GradientAccumulators,
        options: StepOptions,
        stages: GradientCollectives | None,
        replicas: GradientCollectives | None,
    ) -> None:
        self.model, self.variables, self.owned = model, list(variables), owned
        self.sums, self.options = sums, options
        self.stages, self.replicas = stages, replicas
        self._applied = self.variables  # those that Keras is applying gradients to
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, slices: dict[int, list[Any]], dense: Collection[int], weight: float) -> None:
        """Update the weights, once `reduce` has seen all of their gradients.

        Args:
            slices: values and indices in turn, by variable.
            dense: `id()` of the variables with a dense gradient.
            weight: this replica's part of the update's examples.
        """
        sparse = [v for v in self.variables if id(v) in slices and id(v) not in dense]
        parts = [joined(slices[id(v)]) for v in sparse]
        key = (tuple(map(id, sparse)), tuple(sorted(dense)))
        update = self._compiled(key, partial(self._update, sparse, dense))
        update(parts, tf.constant(weight, tf.float64))

    def reduce(
        self,
        variables: Sequence[Any],
        slices: dict[int, list[Any]],
        weight: float,
        others: Sequence[Any] = (),
    ) -> None:
        """Sum the gradients of some variables over replicas, in place, and before `__call__`.

        Args:
            variables: the same ones in all replicas.
            slices: values and indices in turn, by variable.
            weight: this replica's part of the update's examples.
            others: variables whose sums stay as they are.
        """
        dense = [v for v in variables if self.sums.has(v)]
        sparse = [v for v in variables if id(v) in slices and not self.sums.has(v)]
        if self.replicas is None or not (dense or sparse):
            return
        arrays = self.sums.memory(dense, others)
        if arrays is not None:
            # They are weighted already; those of padding are ignored.
            self.replicas.reduce_in_place(arrays, float(weight > 0))
            dense = []
            if not sparse:
                return
        key = ("reduce", tuple(map(id, dense)), tuple(map(id, sparse)))
        reduce = self._compiled(key, partial(self._reduce, dense, sparse))
        parts = [joined(slices[id(v)]) for v in sparse]
        reduced = reduce(parts, tf.constant(weight, tf.float64))
        for variable, pair in zip(sparse, reduced, strict=True):
            slices[id(variable)] = list(pair)

    def is_finite(self, slices: dict[int, list[Any]], dense: Collection[int]) -> bool:
        """Return whether all gradients that this stage has summed are finite.

        A loss scale checks that itself.
        """
        if scales_loss(self.model.optimizer):
            return True
        values = [self.sums.of(v).value() for v in self.variables if id(v) in dense]
        values += [values for v in self.variables for values in slices.get(id(v), ())[::2]]
        return bool(all_finite(values))

    def _reduce(
        self,
        dense: Sequence[Any],
        sparse: Sequence[Any],
        parts: Any,
        weight: tf.Tensor,
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        assert self.replicas is not None
        # They are weighted already; those of padding are ignored.
        present, order = tf.cast(weight > 0, tf.float64), InOrder()
        last: list[tf.Operation] = []
        for group in _groups(dense):
            with tf.control_dependencies(last):
                gradients = [self.sums.take(v) for v in group]
            reduced = self.replicas.reduce(gradients, present, order)
            for variable, total in zip(group, reduced, strict=True):
                last = [self.sums.of(variable).assign(total).op]
        found = [_slices(v, part) for v, part in zip(sparse, parts, strict=True)]
        return [(x.values, x.indices) for x in self.replicas.reduce(found, present, order)]

    def average(self, changed: Sequence[Any], weight: float) -> None:
        """Average statistics that a step has changed, such as BatchNorm's, over replicas.

        In a call of its own, after the all-reduces over stages.

        Raises:
            ModelError: one is declared as a sum, of which a replica's part is not known.
        """
        if self.replicas is None or not changed:
            return
        ours = {id(v) for v in self.model.non_trainable_variables}  # metrics are summed later
        if sums := [v.path for v in changed if id(v) in ours and aggregation_of(v) == "sum"]:
            raise ModelError(
                f'{", ".join(sums)} has aggregation="sum", which a pipeline with several replicas '
                "cannot add up. Count it in a metric, or start as many processes as it has stages."
            )
        average = self._compiled(("average", *map(id, changed)), partial(self._average, changed))
        average(tf.constant(weight, tf.float64))

    def _compiled(self, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` compiled, once for each `key`."""
        if key not in self._functions:
            self._functions[key] = tf.function(function, reduce_retracing=True, autograph=False)
        return self._functions[key]

    def _average(self, changed: Sequence[Any], weight: tf.Tensor) -> None:
        context = StepContext(weight, self.replicas)
        context.assigned = {id(v): v for v in changed}
        average_statistics(context, self.model)

    def _update(
        self,
        sparse: Sequence[Any],
        dense: Collection[int],
        parts: list[tuple[tf.Tensor, tf.Tensor]],
        weight: tf.Tensor,
    ) -> None:
        given = {id(v): part for v, part in zip(sparse, parts, strict=True)}
        context = StepContext(
            weight,  # no collectives: `reduce` has summed the gradients
            hooks=self.hooks(),
        )
        gradients = []
        for variable in self.variables:
            total = self.sums.take(variable) if id(variable) in dense else None
            if id(variable) in given:
                gradients.append(_slices(variable, given[id(variable)]))
            else:
                gradients.append(total)
        optimizer = self.model.optimizer
        with (
            keras_patches(context, optimizers_of(self.model)),
            self.over_stages(),
            _one_by_one(optimizer),
            held_averages(self.model),
        ):
            optimizer.apply(gradients, self.variables)

    def hooks(self) -> tuple[GradientHook, ...]:
        """Functions of reduced gradients and their variables: the user's, then clipping."""
        return (*map(_unless_empty, self.options.hooks), self._clip, self._join)

    def _clip(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        limit = self.options.clip.global_norm
        if limit is None:
            return list(self.options.clip(gradients, variables))
        norm = self._norm(gradients, variables)
        return list(tf.clip_by_global_norm(gradients, limit, use_norm=norm)[0])

    def _join(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Take part in the update of the other stages where this one has no gradient, which Keras
        refuses: in the global norm, averages of weights, the count of updates."""
        if any(g is not None for g in gradients):
            return gradients
        plain = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        plain._backend_apply_gradients([], [])
        plain.iterations.assign_add(1)
        return []

    def _norm(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """The L2 norm of the gradients of all stages."""
        squares = [
            tf.reduce_sum(tf.square(g.values if isinstance(g, tf.IndexedSlices) else g))
            for g, v in zip(gradients, variables, strict=True)
            if g is not None and id(v) in self.owned
        ]
        dtype = next((g.dtype for g in gradients if g is not None), tf.float32)
        total = tf.add_n(squares) if squares else tf.zeros((), dtype)
        return tf.sqrt(tf.cast(self.sum(tf.cast(total, tf.float64)), dtype))

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over stages, of values that are summed over replicas already."""
        if self.stages is None:
            return whole(value)
        return whole(self.stages.sum(tf.reshape(value, [1]), InOrder())[0])

    @contextmanager
    def over_stages(self) -> Iterator[None]:
        """Keras' own global norm and check for finite gradients, over all stages."""

        def global_norm(gradients: Sequence[Any]) -> Any:
            # Keras has dropped variables without gradients by then, and kept the order.
            return self._norm(gradients, self._applied)

        def check_finite(optimizer: Any, gradients: Sequence[Any]) -> Any:
            bad = [
                tf.reduce_sum(tf.cast(~tf.math.is_finite(_values(g)), tf.float64))
                for g in gradients
                if g is not None
            ]
            return self.sum(tf.add_n(bad) if bad else tf.zeros((), tf.float64)) == 0

        apply = base_optimizer.BaseOptimizer._backend_apply_gradients

        def remember(optimizer: Any, gradients: Any, variables: Any) -> Any:
            self._applied = list(variables)
            return apply(optimizer, gradients, variables)

        with replaced(
            (base_optimizer, "global_norm", global_norm),
            (keras.optimizers.LossScaleOptimizer, "check_finite", check_finite),
            (base_optimizer.BaseOptimizer, "_backend_apply_gradients", remember),
        ):
            yield


def _groups(variables: Sequence[Any]) -> list[list[Any]]:
    """The variables in order, in groups of one, or of several that are small together.

    A group's gradients are in memory twice while they are summed over replicas.
    """
    groups: list[list[Any]] = []
    filled = 0
    for variable in variables:
        nbytes = int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
        if not groups or filled + nbytes > _GROUP_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(variable)
        filled += nbytes
    return groups


@contextmanager
def _one_by_one(optimizer: Any) -> Iterator[None]:
    """Update one variable after the other."""
    plain = getattr(optimizer, "inner_optimizer", optimizer)
    original, apply_in_order = plain.update_step, UpdateOrdering()

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        apply_in_order(lambda: original(gradient, variable, learning_rate))

    plain.update_step = update_step
    try:
        yield
    finally:
        del plain.update_step


def _unless_empty(hook: Any) -> Any:
    """Wrap a user's hook so that stages without weights do not call it."""
    return lambda gradients, variables: hook(gradients, variables) if variables else gradients


def _slices(variable: Any, part: tuple[tf.Tensor, tf.Tensor]) -> tf.IndexedSlices:
    return tf.IndexedSlices(*part, tf.constant(tuple(variable.shape), tf.int64))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
