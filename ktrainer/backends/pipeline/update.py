"""The update of a stage's weights: gradients over replicas, then clipped and applied.

What an optimizer must know of all stages together, it asks them inside the compiled update: the
global norm of the gradients, and whether all of them are finite, so that a common loss scale
rises and falls on every stage alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from keras.src.optimizers import base_optimizer

from ktrainer.backends.pipeline.shared import joined
from ktrainer.backends.pipeline.sums import GradientSums
from ktrainer.backends.pipeline.turns import InTurn
from ktrainer.steps import StepOptions, optimizers_of
from ktrainer.steps.context import StepContext
from ktrainer.steps.guard import all_finite, scales_loss
from ktrainer.steps.model_step import average_statistics
from ktrainer.steps.seams import seams
from ktrainer.world.plane import GradientPlane, InOrder

_GROUP_BYTES = 4 * 2**20


class StageUpdate:
    """Applies the gradients of one stage.

    Args:
        model: the whole model.
        variables: trained ones that are held here.
        owned: `id()` of those whose gradients count here for the norm: shared ones count once.
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
        sums: GradientSums,
        options: StepOptions,
        stages: GradientPlane | None,
        replicas: GradientPlane | None,
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
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda parts, weight: self._update(sparse, dense, parts, weight),
                reduce_retracing=True,
                autograph=False,
            )
        self._functions[key](parts, tf.constant(weight, tf.float64))

    def reduce(
        self,
        variables: Sequence[Any],
        slices: dict[int, list[Any]],
        weight: float,
        others: Sequence[Any] = (),
    ) -> None:
        """Sum the gradients of some variables over replicas, in place, and before `__call__`.

        Args:
            variables: with what they have, the same ones in all replicas.
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
            # They are weighted already; those of a stand-in are not looked at.
            self.replicas.reduce_in_place(arrays, float(weight > 0))
            dense = []
            if not sparse:
                return
        key = ("reduce", tuple(map(id, dense)), tuple(map(id, sparse)))
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda parts, weight: self._reduce(dense, sparse, parts, weight),
                reduce_retracing=True,
                autograph=False,
            )
        parts = [joined(slices[id(v)]) for v in sparse]
        reduced = self._functions[key](parts, tf.constant(weight, tf.float64))
        for variable, pair in zip(sparse, reduced, strict=True):
            slices[id(variable)] = list(pair)

    def is_finite(self, slices: dict[int, list[Any]], dense: Collection[int]) -> bool:
        """Whether all gradients that this stage has summed are finite. A loss scale finds that
        by itself."""
        if scales_loss(self.model.optimizer):
            return True
        values = [self.sums.of(v).value() for v in self.variables if id(v) in dense]
        values += [values for v in self.variables for values in slices.get(id(v), ())[::2]]
        return bool(all_finite(values))

    def _reduce(
        self, dense: Sequence[Any], sparse: Sequence[Any], parts: Any, weight: tf.Tensor
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        assert self.replicas is not None
        # They are weighted already; those of a stand-in are not looked at.
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

    def average(self, moved: Sequence[Any], weight: float) -> None:
        """Average statistics that a step has changed, such as BatchNorm's, over replicas.

        In a call of its own: ranks that meet here have left the sums over stages behind.
        """
        if self.replicas is None or not moved:
            return
        key = tuple(map(id, moved))
        if key not in self._functions:
            self._functions[key] = tf.function(
                lambda weight: self._average(moved, weight), autograph=False
            )
        self._functions[key](tf.constant(weight, tf.float64))

    def _average(self, moved: Sequence[Any], weight: tf.Tensor) -> None:
        context = StepContext(weight, self.replicas)
        context.assigned = {id(v): v for v in moved}
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
            weight,  # no plane: `reduce` has summed them
            hooks=(*map(_unless_empty, self.options.hooks), self._clip, self._join),
        )
        gradients = []
        for variable in self.variables:
            total = self.sums.take(variable) if id(variable) in dense else None
            if id(variable) in given:
                gradients.append(_slices(variable, given[id(variable)]))
            else:
                gradients.append(total)
        optimizer = self.model.optimizer
        with seams(context, optimizers_of(self.model)), self._over_stages(), _one_by_one(optimizer):
            optimizer.apply(gradients, self.variables)

    def _clip(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        limit = self.options.clip.global_norm
        if limit is None:
            return list(self.options.clip(gradients, variables))
        norm = self._norm(gradients, variables)
        return list(tf.clip_by_global_norm(gradients, limit, use_norm=norm)[0])

    def _join(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Do what the other stages do where this one has no gradient: Keras' optimizers would
        not take part in the global norm, nor count the update, nor go without any gradient."""
        if any(g is not None for g in gradients):
            return gradients
        plain = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        if plain.global_clipnorm:
            self._norm([], [])
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
        return tf.sqrt(tf.cast(self._sum(tf.cast(total, tf.float64)), dtype))

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum over stages. It comes after the sums over replicas, since it needs them."""
        if self.stages is None:
            return value
        return self.stages.sum(tf.reshape(value, [1]), InOrder())[0]

    @contextmanager
    def _over_stages(self) -> Iterator[None]:
        """Keras' own global norm and check for finite gradients, over all stages."""

        def global_norm(gradients: Sequence[Any]) -> Any:
            # Keras has left out variables without gradients by then, and kept the order.
            return self._norm(gradients, self._applied)

        def check_finite(optimizer: Any, gradients: Sequence[Any]) -> Any:
            bad = [
                tf.reduce_sum(tf.cast(~tf.math.is_finite(_values(g)), tf.float64))
                for g in gradients
                if g is not None
            ]
            return self._sum(tf.add_n(bad) if bad else tf.zeros((), tf.float64)) == 0

        apply = base_optimizer.BaseOptimizer._backend_apply_gradients

        def remember(optimizer: Any, gradients: Any, variables: Any) -> Any:
            self._applied = list(variables)
            return apply(optimizer, gradients, variables)

        replaced: list[tuple[Any, str, Any]] = [
            (base_optimizer, "global_norm", global_norm),
            (keras.optimizers.LossScaleOptimizer, "check_finite", check_finite),
            (base_optimizer.BaseOptimizer, "_backend_apply_gradients", remember),
        ]
        with ExitStack() as stack:
            for owner, name, replacement in replaced:
                stack.enter_context(patch.object(owner, name, replacement))
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
    original, in_turn = plain.update_step, InTurn()

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        in_turn(lambda: original(gradient, variable, learning_rate))

    plain.update_step = update_step
    try:
        yield
    finally:
        del plain.update_step


def _unless_empty(hook: Any) -> Any:
    """A user's hook, which need not know of stages without weights."""
    return lambda gradients, variables: hook(gradients, variables) if variables else gradients


def _slices(variable: Any, part: tuple[tf.Tensor, tf.Tensor]) -> tf.IndexedSlices:
    return tf.IndexedSlices(*part, tf.constant(tuple(variable.shape), tf.int64))


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
