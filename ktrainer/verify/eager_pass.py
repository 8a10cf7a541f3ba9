"""One pass of a model's `train_step` without side effects: its loss and gradients.

A pass runs eagerly, so that nothing is compiled for it and no `tf.function` of the user's keeps
what was traced meanwhile. What it assigns goes to copies: the variables themselves, with their
values in whatever strategy they are, are not touched.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from ktrainer.distributed.collectives import densified
from ktrainer.runtime.monkeypatching import entered_in_this_thread, replaced_in
from ktrainer.steps.compiled_program import trace_once
from ktrainer.steps.embedding_gradients import CommonSlices, mark_common
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.optimizers import is_linear, optimizers_of
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.step_helpers import python_step, rows_of
from ktrainer.steps.update_guard import LossOfStep
from ktrainer.verify.batch_invariant_random import (
    RandomDraws,
    batch_invariant_random,
    frozen_batch_norm,
)
from ktrainer.verify.side_effects import CheckSkipped, Untouched


@dataclass
class GradientPass:
    """Results of one pass.

    Attributes:
        gradients: one list for each time that an optimizer was applied; None where a variable has
            no gradient.
        variables: what they are of.
        loss: the mean loss; None where the model keeps none.
        denominators: those that losses were divided by.
        changed: Python attributes that the step changed, by name.
        scaled: paths of variables whose optimizer scales small gradients up, as all but SGD do.
        squared_slices: how many rows of each variable were looked up, by path, where the optimizer
            squares the gradient of each lookup by itself, as all but SGD do.
        uneven: whether a loss had another number of values than the examples ask for.
    """

    gradients: list[list[tf.Tensor | None]] = field(default_factory=list)
    variables: list[list[Any]] = field(default_factory=list)
    loss: float | None = None
    denominators: list[tf.Tensor] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    scaled: set[str] = field(default_factory=set)
    squared_slices: Counter[str] = field(default_factory=Counter)
    uneven: bool = False


class GradientPasses:
    """Runs passes of one model; use it inside of `eager_passes`.

    Args:
        model: compiled, and all of it in this process.
        uniform: whether all examples have the same shape; see `StepContext`.
        draws: what random functions give.
        seconds: no layer is called once so many have gone by.
    """

    def __init__(
        self, model: keras.Model, uniform: bool, draws: RandomDraws, seconds: float = float("inf")
    ) -> None:
        self.model, self.uniform, self._draws = model, uniform, draws
        self._until = time.monotonic() + seconds

    def whole(self, batch: Any) -> GradientPass:
        """Loss and gradients of all examples at once."""
        context = StepContext(
            _float(1.0), uniform=self.uniform, capture=True, compares=True, rows=rows_of(batch)
        )
        return self._run(batch, context)

    def split(self, batches: Sequence[Any], weights: Sequence[float]) -> GradientPass:
        """The same from several parts, combined as ranks, replicas and microbatches are."""
        counted = [self._part(b, w, None) for b, w in zip(batches, weights, strict=True)]
        if self.uniform and not self.model.run_eagerly and any(part.uneven for part in counted):
            self.uniform = False  # so that each denominator is counted
            counted = [self._part(b, w, None) for b, w in zip(batches, weights, strict=True)]
        if not any(part.denominators for part in counted):
            return combined(counted, weights)
        # As the very step does: what losses are divided by is counted over all parts first.
        columns = zip(*(part.denominators for part in counted), strict=True)
        totals = [tf.add_n(list(column)) for column in columns]
        pairs = zip(batches, weights, strict=True)
        return combined((self._part(b, w, totals) for b, w in pairs), weights)

    def outputs(self, batch: Any) -> list[np.ndarray]:
        """The model's outputs for a batch, flat and as float64, as in inference."""
        context = StepContext(_float(1.0), cast(Any, _NoRanks()), uniform=self.uniform)
        found = keras.tree.flatten(self._called(batch, context, training=False))
        return [tf.cast(each, tf.float64).numpy() for each in found]

    def assigned(self, batch: Any) -> list[str]:
        """Paths of the variables that the model's call in training assigns, but for those of batch
        normalization, which is frozen, and of seed generators."""
        context, model = StepContext(_float(1.0), uniform=self.uniform), self.model
        self._called(batch, context, training=True)
        seeds = {id(g.state) for layer in model._flatten_layers() for g in layer._seed_generators}
        found = context.assigned.keys() - seeds
        return [v.path for v in model.variables if id(v) in found]

    def _called(self, batch: Any, context: StepContext, training: bool) -> Any:
        self._draws.restart()
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with (
            Untouched(self.model),
            keras_patches(context, optimizers_of(self.model)),
            _until(self._until),
        ):
            return self.model(inputs, training=training)

    def _part(
        self, batch: Any, weight: float, denominators: list[tf.Tensor] | None
    ) -> GradientPass:
        record = denominators is None
        context = StepContext(
            _float(weight),
            cast(Any, _NoRanks()),
            uniform=self.uniform,
            denominators=[] if denominators is None else denominators,
            record=record,
            capture=True,
            compares=True,
            rows=rows_of(batch),
        )
        done = self._run(batch, context)
        if record and context.denominators:  # the gradients follow once these are counted
            done.denominators, done.gradients = list(context.denominators), []
        return done

    def _run(self, batch: Any, context: StepContext) -> GradientPass:
        self._draws.restart()
        with (
            Untouched(self.model) as untouched,
            keras_patches(context, optimizers_of(self.model)),
            _until(self._until),
        ):
            for metric_variable in self.model.metrics_variables:
                metric_variable.assign(tf.zeros_like(metric_variable.value))
            loss = LossOfStep(self.model)
            python_step(self.model.train_step)(batch)
            total, count = loss.sums()
            done = GradientPass(loss=float(total / count) if count > 0 else None)
        for optimizer, gradients, variables in context.captured:
            if not is_linear(optimizer):
                done.scaled.update(v.path for v in variables)
            done.squared_slices += _squared_slices(optimizer, gradients, variables)
            done.gradients.append([None if g is None else densified(g) for g in gradients])
            done.variables.append(list(variables))
        done.changed, done.uneven = untouched.changed, context.uneven
        return done


def combined(parts: Iterable[GradientPass], weights: Sequence[float]) -> GradientPass:
    """The sum of w * gradient over the parts, which are consumed: they lose their gradients.

    Raises:
        CheckSkipped: the parts applied their optimizers differently.
    """
    total: GradientPass | None = None
    for part, weight in zip(parts, weights, strict=True):
        if part.loss is not None:
            part.loss *= weight
        if total is None:
            total = replace(part, gradients=[[None] * len(each) for each in part.gradients])
        else:
            _add(part, total)
        _add_gradients(part, weight, total)
    assert total is not None
    return total


def _add(part: GradientPass, total: GradientPass) -> None:
    ids = [[[id(v) for v in each] for each in one.variables] for one in (part, total)]
    if ids[0] != ids[1]:
        raise CheckSkipped("train_step applies its optimizers differently to other examples")
    total.loss = None if part.loss is None or total.loss is None else total.loss + part.loss
    total.squared_slices += part.squared_slices


def _add_gradients(part: GradientPass, weight: float, total: GradientPass) -> None:
    for sums, gradients in zip(total.gradients, part.gradients, strict=True):
        for i, gradient in enumerate(gradients):
            gradients[i] = None  # all gradients of a part take as much memory as the model
            if gradient is not None:
                weighted, before = gradient * tf.cast(weight, gradient.dtype), sums[i]
                sums[i] = weighted if before is None else before + weighted


def _squared_slices(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    if is_linear(optimizer):
        return Counter()
    pairs = zip(gradients, variables, strict=True)
    return Counter(
        {v.path: int(g.indices.shape[0]) for g, v in pairs if isinstance(g, tf.IndexedSlices)}
    )


def summed_tables(model: keras.Model, spec: Any) -> set[str]:
    """The paths of the variables of which a step sums the slices of parts, rather than put them one
    after another. The step is traced once, and not run.

    Args:
        spec: nested, of batches.
    """
    found = set()

    def step(batch: Any) -> None:
        context = StepContext(_float(1.0), capture=True, compares=True, rows=rows_of(batch))
        with keras_patches(context, optimizers_of(model)):
            python_step(model.train_step)(batch)
        for _, gradients, variables in context.captured:
            for gradient, variable in zip(gradients, variables, strict=True):
                if isinstance(mark_common(gradient, context.rows), CommonSlices):
                    found.add(variable.path)

    with Untouched(model):
        trace_once(step, spec)
    return found


@contextmanager
def eager_passes(draws: RandomDraws) -> Iterator[None]:
    """Context of passes: functions are not compiled, random numbers do not depend on the batch,
    batch normalization is frozen, random generators keep their state, and float32 products are not
    computed in TF32: off by 5e-4, gradients that are zero would not be told from others."""
    eagerly, experimental = tf.config.functions_run_eagerly(), tf.config.experimental
    with_tf32 = experimental.tensor_float_32_execution_enabled()
    # Private, like everything that tells the state of the eager generator of seeds.
    generator = getattr(eager_context.context(), "_rng", None)
    states = random.getstate(), np.random.get_state(), generator and generator.getstate()
    with ExitStack() as stack:
        stack.enter_context(batch_invariant_random(draws))
        stack.enter_context(frozen_batch_norm())
        stack.callback(tf.config.run_functions_eagerly, eagerly)
        tf.config.run_functions_eagerly(True)
        stack.callback(experimental.enable_tensor_float_32_execution, with_tf32)
        experimental.enable_tensor_float_32_execution(False)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if generator is not None:
                generator.setstate(states[2])


@contextmanager
def _until(end: float) -> Iterator[None]:
    """Let calls of layers fail once it is later than `end`: eagerly, a long sequence takes long."""
    layer, scope = keras.layers.Layer, object()
    original = layer.__call__

    def call(self: Any, *args: Any, **named: Any) -> Any:
        if time.monotonic() > end:
            raise CheckSkipped("it would take too long")
        return original(self, *args, **named)

    with entered_in_this_thread(scope), replaced_in(scope, [(layer, "__call__", call)]):
        yield


class _NoRanks:
    """Collectives of a pass: using them skips the check, as the parts are computed one by one."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CheckSkipped("its step gathers the examples of all ranks (ktrainer.all_gather)")


def _float(value: float) -> tf.Tensor:
    return tf.constant(value, tf.float64)
