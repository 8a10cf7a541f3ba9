"""One update of the weights from several parts of a batch: count, compute, reduce, apply.

    count     what each loss is divided by, of every part: masked tokens, summed weights
    reduce    these denominators, over all parts and ranks
    compute   the losses of each part, divided by them, and its gradients, weighted and added up
    apply     the gradients, summed over ranks, once

Denominators come first, for a masked loss must know its own before the first backward pass. They
are counted by a function of its own, traced from the same step without touching any state, of which
TensorFlow keeps only what leads to the masks.

Parts are the batches that accumulate into one update; of replicas of tf.distribute, also the one of
a step that is compiled with XLA, in which nothing can be communicated; of a pipeline, microbatches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf

from ktrainer.distributed.collectives import Gradient, weighted
from ktrainer.errors import ModelError
from ktrainer.steps.embedding_gradients import mark_common
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.variable_assignments import without_assignments

Part = TypeVar("Part")
Tensors = list[list[tf.Tensor]]  # for each variable nothing, a gradient, or values and indices


class UpdateInParts(ABC, Generic[Part]):
    """The algorithm; what each phase is, and where it runs, is for subclasses to say."""

    def __call__(self, parts: Sequence[Part]) -> Any:
        """One update; returns the logs of its last part."""
        counts = [self.count(part) for part in parts]
        denominators = total_denominators(counts, self.reduce_denominators)
        total: Any = None
        for part in parts[:-1]:
            _, gradients = self.compute(part, denominators)
            total = gradients if total is None else self.add(total, gradients)
        return self.finish(parts, denominators, total)

    def finish(self, parts: Sequence[Part], denominators: tf.Tensor, total: Any) -> Any:
        """Compute the last part and apply the update; returns the logs.

        Args:
            total: the gradients of the other parts; None: there are none.
        """
        logs, gradients = self.compute(parts[-1], denominators)
        return self.apply(parts, gradients if total is None else self.add(total, gradients), logs)

    @abstractmethod
    def count(self, part: Part) -> tf.Tensor:
        """The denominators of a part's losses, float64."""

    def reduce_denominators(self, denominators: tf.Tensor) -> tf.Tensor:
        """Their sums over ranks, unless `count` has summed them."""
        return denominators

    @abstractmethod
    def compute(self, part: Part, denominators: tf.Tensor) -> tuple[Any, Any]:
        """The logs of a part, and its gradients, weighted."""

    @abstractmethod
    def add(self, total: Any, more: Any) -> Any:
        """The sum of gradients that `compute` has returned."""

    @abstractmethod
    def apply(self, parts: Sequence[Part], total: Any, logs: Any) -> Any:
        """Sum the gradients over ranks and apply them; returns the logs, as they are then."""


def count_denominators(context: StepContext, step: Callable[[], Any]) -> tf.Tensor:
    """The denominators of the losses that `step` computes, float64, in their order.

    Args:
        context: what the step is traced with; it records.
    """
    assert context.record
    with without_assignments(context):
        step()
    found = context.denominators or []
    return tf.stack(found) if found else tf.zeros([0], tf.float64)


def total_denominators(
    counts: Sequence[tf.Tensor], reduce: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Each loss's denominator over all parts of an update.

    Args:
        counts: of each part of this process.
        reduce: sums over ranks.
    """
    local = counts[0] if len(counts) == 1 else tf.add_n(counts)
    return reduce(local) if local.shape[0] else local


class GradientParts:
    """The gradients of one optimizer, as tensors that the parts of an update can add up.

    Attributes:
        optimizer: what applies them; known once a step is traced.
        variables: what they are of.
        kinds: for each variable the class of its gradient; None if it has none.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.optimizer: Any = None
        self.variables: list[Any] = []
        self.kinds: list[type | None] = []

    def take(self, context: StepContext) -> Tensors:
        """The weighted gradients of a step that was traced with `context`, which captures."""
        context.check_denominators()
        self.optimizer, gradients, self.variables = captured_gradients(context, self._model)
        marked = [mark_common(g, context.rows) for g in gradients]
        # The first trace decides for those that come after.
        self.kinds = self.kinds or [_kind(g) for g in marked]
        return [_tensors(g, context.weight) for g in marked]

    def add(self, total: Tensors, more: Tensors) -> Tensors:
        """The sum of two parts. Slices stay slices, repeated indices apart."""
        return [_sum(kind, a, b) for kind, a, b in zip(self.kinds, total, more, strict=True)]

    def whole(self, parts: Tensors) -> list[Gradient]:
        """The gradients of all variables that `parts` are."""
        return [
            _whole(kind, tensors, v)
            for kind, tensors, v in zip(self.kinds, parts, self.variables, strict=True)
        ]


def captured_gradients(
    context: StepContext, model: keras.Model
) -> tuple[Any, list[Any], list[Any]]:
    """The optimizer that a step applied, its gradients and variables.

    Raises:
        ModelError: the step applied none, or several.
    """
    if len(context.captured) != 1:
        raise ModelError(
            f"{type(model).__name__}.train_step applies {len(context.captured)} optimizers; "
            "trainer.accumulate > 1, and trainer.xla with replicas of tf.distribute, need a step "
            "that applies exactly one, once. Set trainer.accumulate=1 and trainer.xla=false."
        )
    return context.captured[0]


def _kind(gradient: Gradient | None) -> type | None:
    if gradient is None:
        return None
    return type(gradient) if isinstance(gradient, tf.IndexedSlices) else tf.Tensor


def _tensors(gradient: Gradient | None, weight: tf.Tensor) -> list[tf.Tensor]:
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        return [weighted(gradient.values, weight), gradient.indices]
    return [weighted(gradient, weight)]


def _sum(kind: type | None, total: list[tf.Tensor], more: list[tf.Tensor]) -> list[tf.Tensor]:
    if kind is tf.IndexedSlices:
        return [tf.concat([a, b], 0) for a, b in zip(total, more, strict=True)]
    # Common slices have the same indices in both.
    return [a + b for a, b in zip(total[:1], more[:1], strict=True)] + total[1:]


def _whole(kind: type | None, tensors: Sequence[tf.Tensor], variable: Any) -> Gradient | None:
    if kind is None:
        return None
    if kind is tf.Tensor:
        return tensors[0]
    values, indices = tensors
    return kind(values, indices, tf.constant(tuple(variable.shape), tf.int64))
