"""Context of a traced step: the weights and denominators that make ranks equal one process.

The convention that everything here follows: every part of an update (a rank's local batch, or
one of its microbatches) has a weight w, its number of examples divided by that of the whole update,
and a loss L that is a *mean*, so that the loss of the whole update is the sum of w * L over all
parts. Gradients are therefore summed with the weights w. Then

* a loss that a user computes as a mean over examples is right as it is;
* a Keras loss, normalised by its own denominator (masked tokens, summed weights), is divided by
  that denominator counted over all parts and then by w, which the sum takes out again;
* a loss that is a sum over a part's examples, as Keras makes of vectors, is divided by w;
* a regularisation loss, the same on every part, counts once, since the weights add up to 1;
* a loss over examples that were gathered is the same on all ranks and counts once, likewise;
* a metric that adds up parts' results counts each with its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import tensorflow as tf

from ktrainer.distributed.collectives import GradientCollectives, InOrder, weighted
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import entered_here, entered_in_this_thread
from ktrainer.steps.assertions import assert_in_graph, assert_some_rows
from ktrainer.steps.embedding_gradients import mark_common
from ktrainer.steps.gradient_flow import GradientFlow
from ktrainer.steps.powersgd import PowerSgd, Remainder
from ktrainer.steps.reduce_gradients import reduce_gradients
from ktrainer.steps.step_options import GradientHook
from ktrainer.steps.update_guard import UpdateGuard, all_finite
from ktrainer.steps.variable_assignments import depends_on_batch


def present_graph() -> Any:
    """The graph that is being traced; None where nothing is."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@dataclass(frozen=True)
class GatheredRows:
    """Rows that were gathered from all ranks.

    Attributes:
        own: int64 scalar; how many of them are this rank's.
        total: int64 scalar; how many there are.
        weight: float64 scalar; the weights of all ranks' parts together: 1, unless an update has
            several batches.
        views: whether a loss may stack several gathered tensors along the first axis (two views of
            each example).
    """

    own: tf.Tensor
    total: tf.Tensor
    weight: tf.Tensor
    views: bool


class TracedContext:
    """Base class of a `StepContext`, and of the one that delegates to that of each replica."""


@dataclass
class StepContext(TracedContext):
    """The surroundings of one step while it is traced.

    Attributes:
        weight: float64 scalar; this part's share of the update's examples, 0 for padding.
        collectives: sums over ranks; None in one process.
        rank: this process's number; other ranks than 0 draw other random numbers. An int32 scalar
            where replicas learn their numbers only when the step runs.
        stage: the number of this stage of a pipeline: other stages than 0 draw other random numbers
            from generators that several stages draw from.
        shared_seeds: `id()` of the states of those generators.
        uniform: whether all batch dimensions but the first are static, so that every
            denominator that counts elements is proportional to the number of examples.
        hooks: functions of (gradients, variables), applied once gradients are reduced.
        gradient_weight: what gradients are summed with, if it is not `weight`.
        denominators: this update's denominators, already counted over all parts, in the order
            of the losses; None to count each with a collective of its own.
        record: count denominators only: they are added to `denominators` and nothing is summed.
        capture: keep what `optimizer.apply` is called with in `captured`, and do not apply it.
        assigned: variables that the step assigned, by id.
        applies: how many times an optimizer was applied.
        xla: whether the step is compiled with XLA; with `capture`, in a piece, in which nothing can
            be communicated.
        compiled: the name of a function with `jit_compile=True` that the step calls, while that is
            traced; nothing can be communicated in it either, nor may its tensors be kept here.
        merge_replicas: `merge_replicas(optimizer, update, gradients)` runs `update(gradients)` once
            for all replicas of this process, with reduced gradients; None where a process has one.
        guard: skips updates; None: none is skipped.
        loss: gives this part's mean loss, float64, once the loss is computed; with a guard.
        times: how many times the weights of gradients are those of parts.
        loss_of_all: float64; that of the whole update, once gradients are reduced.
        bad: whether the update is skipped, once that is known.
        rows: rows of this part's batch as its tensors have them (1 for padding): an int where
            their number is static.
        rows_agree: whether all arguments of a step of the user's own have so many.
        rows_of_draws: the rows for which `tf.random` draws, where `rows` are not known: those of a
            pipeline's microbatch, whose tensors have static shapes.
        draws_for_batch: a function of `keras.random` draws what is not for examples, the same on
            all ranks.
        gathered: row counts and weights of what was gathered in this step; see `steps.all_gather`.
        in_global_loss: a loss of the whole batch is computed now, the same on all ranks; see
            `steps.loss_scope`.
        predicts: it is a step of prediction, whose ranks draw apart, and share nothing.
        split: the batch is split into microbatches, so rows cannot be gathered within a step.
        sums: a rank's scalars are parts of a sum over ranks, as in a loop of the user's own, and
            not means of its rows.
        on_assign: called with a Keras variable and its new value before it is assigned, but not
            where an optimizer assigns.
        updating: an optimizer assigns now.
        applying: gradients are summed, and hooked, clipped and applied now.
        graph: that in which the step is traced; None if it runs eagerly.
        flow: which tensors are computed from this part's gradients of weights.
        upstream: which tensors are computed from gradients that a tape has returned, of anything.
        differentiated_by: references of the tensors that a tape has differentiated by.
        part_gradients: the last ones that the step took in `graph`, and their weights, by the
            `id()` of a weight.
        summed_gradients: their sums over ranks, where those are known; see
            `steps.clipped_gradients`.
        compares: gradients are compared, and not applied: clipping leaves them as they are.
        uneven: a loss has not as many values as the part's examples ask for, where gradients are
            compared.
        local: `id()` of the variables that are this rank's own; see `steps.local_layers`.
        powersgd: compresses gradients; None: they are sent as they are.
        remainder: what it leaves to be sent later, once gradients are reduced.
    """

    weight: tf.Tensor
    collectives: GradientCollectives | None = None
    rank: int | tf.Tensor = 0
    stage: int = 0
    shared_seeds: Collection[int] = frozenset()
    uniform: bool = True
    hooks: tuple[GradientHook, ...] = ()
    gradient_weight: tf.Tensor | None = None
    denominators: list[tf.Tensor] | None = None
    record: bool = False
    capture: bool = False
    captured: list[tuple[Any, list[Any], list[Any]]] = field(default_factory=list)
    assigned: dict[int, Any] = field(default_factory=dict)
    applies: int = 0
    xla: bool = False
    compiled: str = ""
    merge_replicas: Callable[[Any, Callable[[list[Any]], Any], list[Any]], Any] | None = None
    order: InOrder = field(default_factory=InOrder)
    guard: UpdateGuard | None = None
    loss: Callable[[], tf.Tensor] | None = None
    times: int = 1
    loss_of_all: tf.Tensor | None = None
    bad: tf.Tensor | None = None
    rows: int | tf.Tensor | None = None
    rows_agree: tf.Tensor | None = None
    rows_of_draws: int | None = None
    draws_for_batch: bool = False
    gathered: list[GatheredRows] = field(default_factory=list)
    in_global_loss: bool = False
    predicts: bool = False
    split: bool = False
    sums: bool = False
    on_assign: Callable[[Any, Any], None] | None = None
    updating: bool = False
    applying: bool = False
    graph: Any = field(default_factory=present_graph)
    flow: GradientFlow = field(default_factory=GradientFlow)
    upstream: GradientFlow = field(default_factory=GradientFlow)
    differentiated_by: set[Any] = field(default_factory=set)
    part_gradients: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    summed_gradients: dict[Any, Any] = field(default_factory=dict)
    compares: bool = False
    uneven: bool = False
    local: Collection[int] = frozenset()
    powersgd: PowerSgd | None = None
    remainder: Remainder | None = None
    _next: int = 0

    def if_present(self, tensor: tf.Tensor) -> tf.Tensor:
        """`tensor` of a part of real examples; zeros for padding, of which it may be NaN."""
        return tf.where(self.weight > 0, tensor, tf.zeros_like(tensor))

    def as_mean(self, part: tf.Tensor) -> tf.Tensor:
        """The L of which `part` is w * L; 0 for padding."""
        return tf.math.divide_no_nan(self.if_present(part), tf.cast(self.weight, part.dtype))

    def is_over_examples(self, tensor: Any) -> bool:
        """Return whether the first axis of a tensor is the examples, gathered ones included.

        While a step is traced the number of examples is unknown, that of features or weights is
        not. In a step that runs eagerly a vector is over examples if it has as many elements.
        """
        shape = tensor.shape
        if shape.rank == 0:
            return False
        if shape.rank is None or shape[0] is None:
            return True
        if isinstance(self.rows, int) and shape[0] == self.rows:
            return True
        return any(tf.get_static_value(g.total) == shape[0] for g in self.gathered)

    def part(self, tensor: tf.Tensor) -> tf.Tensor:
        """This part's share, float64, of a tensor over examples: 1, unless they were gathered,
        which is told by their number."""
        if not self.gathered:
            return tf.ones([], tf.float64)
        rows = tf.shape(tensor, out_type=tf.int64)[0]
        own = [g.own for g in self.gathered]
        own += [] if self.rows is None else [tf.cast(self.rows, tf.int64)]
        ours = tf.reduce_any(rows == tf.stack(own))
        every = ~ours & tf.reduce_any(rows == tf.stack([g.total for g in self.gathered]))
        views = [tf.maximum(g.total, 1) for g in self.gathered if g.views]
        unclear = tf.reduce_any(rows % tf.stack(views) == 0) if views else tf.constant(False)
        check = assert_in_graph(
            ours | every | ~unclear,
            "a loss has a multiple of the rows that ktrainer.all_gather has gathered, so it "
            "cannot be told whether it is of the examples of all ranks or of one. Reduce it to its "
            "mean before it is differentiated. Rows:",
            rows,
        )
        with tf.control_dependencies(check):
            share = tf.math.divide_no_nan(self.weight, self.gathered[0].weight)
        return tf.where(every, share, tf.ones_like(share))

    def scale_of_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The factor by which the sum of a tensor over all examples of the update becomes its L;
        0 for padding."""
        return self.as_mean(self.part(tensor))

    def denominator(self, local: tf.Tensor) -> tf.Tensor:
        """A loss's denominator counted over all parts of the update, from this part's."""
        local = self.if_present(local)
        if self.record:
            assert self.denominators is not None
            self.denominators.append(tf.cast(local, tf.float64))
            return local
        if self.denominators is not None:
            if self._next == len(self.denominators):
                raise ModelError(
                    "a loss that is divided by its weights, or by the examples that a mask leaves, "
                    "is computed inside a layer, where a pipeline cannot count them over all "
                    "microbatches. Pass it to compile, or use backend=data_parallel"
                )
            total = self.denominators[self._next]
            self._next += 1
            return tf.cast(total, local.dtype)
        return self.sum(local, "a loss counts what it is divided by on all ranks")

    def check_denominators(self) -> None:
        """Refuse a step that has not used all denominators that were counted for it.

        Raises:
            ModelError: it computes other losses than as they were counted.
        """
        counted = 0 if self.denominators is None else len(self.denominators)
        if self._next != counted:
            raise ModelError(
                f"a step has divided {self._next} losses by what was counted over all parts of the "
                f"update, and it was counted for {counted}: the step computed other losses then. "
                "Set trainer.accumulate=1 and trainer.xla=false"
            )

    def sum(
        self, tensor: tf.Tensor, why: str = "BatchNormalization with synchronized=True does"
    ) -> tf.Tensor:
        """`tensor` summed over ranks, in the forward pass; differentiable.

        What ranks differentiate is their own mean loss L, of which only w counts: gradients
        that cross ranks are weighted on the way out and unweighted on the way in.
        """
        if self.collectives is None or self.record:
            return tensor
        if self.capture:
            self.refuse_xla(why)
        self.refuse_compiled(why)
        return self.across(tensor)

    def across(self, tensor: tf.Tensor, weight_of_all: tf.Tensor | None = None) -> tf.Tensor:
        """`sum`, also while denominators are counted.

        Args:
            tensor: what is summed.
            weight_of_all: the weights of all ranks together, where these differentiate the same
                function of the sum, so that no rank needs the others' gradients.
        """
        collectives = self.collectives
        assert collectives is not None

        @tf.custom_gradient
        def sum_over_ranks(value: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                if self.record:
                    return upstream  # only shapes count
                if weight_of_all is None:
                    total = collectives.sum(weighted(upstream, self.weight), self.order)
                else:
                    total = upstream * tf.cast(weight_of_all, upstream.dtype)
                return tf.math.divide_no_nan(total, tf.cast(self.weight, total.dtype))

            return collectives.sum(value, self.order), gradient

        return sum_over_ranks(tensor)

    def refuse_xla(self, what: str) -> None:
        """Refuse to communicate where that cannot be compiled.

        Raises:
            ModelError: the step, or a function that it calls, is compiled with XLA.
        """
        self.refuse_compiled(what)
        if self.xla:
            raise ModelError(
                f"this model communicates in its forward pass ({what}), which XLA cannot compile; "
                "set trainer.xla=false, or remove it"
            )

    def refuse_compiled(self, what: str) -> None:
        """Refuse what a function with `jit_compile=True` cannot do.

        Raises:
            ModelError: one is traced now.
        """
        if self.compiled:
            raise ModelError(
                f"{self.compiled} is a tf.function with jit_compile=True, but XLA cannot compile "
                f"what it does ({what}). Remove jit_compile=True, or move that out of the function"
            )

    def reduce(
        self, gradients: list[Any], variables: list[Any], scale: tf.Tensor | None = None
    ) -> list[Any]:
        """The variables' gradients summed over ranks with their weights; None stays None. Those of
        local variables are weighted only.

        Args:
            scale: the factor by which the loss was scaled, if that changes.
        """
        loss = [] if self.loss is None else [self.loss()]
        if self.collectives is None:
            self.loss_of_all = loss[0] if loss else None
            return gradients
        weight = self.weight if self.gradient_weight is None else self.gradient_weight
        if self.sums and self._weight_batch_gradients(gradients):
            weight = tf.ones([], tf.float64)
        own = self._weigh_local(gradients, variables, weight)
        present = [i for i, g in enumerate(gradients) if g is not None and i not in own]
        if own and loss and self.guard is not None and self.guard.finite:
            # All ranks must skip what one of them skips, and they hear of its loss.
            finite = all_finite([gradients[i] for i in own])
            loss = [tf.where(finite, loss[0], tf.constant(float("nan"), loss[0].dtype))]
        if own and not present and not loss:
            return gradients
        counted = [] if self.rows_agree is None else [self.weight]
        found, of = ([values[i] for i in present] for values in (gradients, variables))
        reduced, numbers = self._reduce(found, of, [*loss, *counted], weight, scale)
        if counted:
            with tf.control_dependencies(assert_some_rows(numbers.pop())):
                reduced = [tf.identity(each) for each in reduced]
                numbers = [tf.identity(each) for each in numbers]
        if loss:
            self.loss_of_all = tf.cast(numbers.pop(), tf.float64) / self.times
        for i, gradient in zip(present, reduced, strict=True):
            gradients[i] = gradient
        return gradients

    def _reduce(
        self,
        gradients: list[Any],
        variables: list[Any],
        numbers: list[tf.Tensor],
        weight: tf.Tensor,
        scale: tf.Tensor | None,
    ) -> tuple[list[Any], list[tf.Tensor]]:
        """Sum gradients, weighted, and numbers over ranks."""
        assert self.collectives is not None
        # Some gradients (of loops, of masked layers) have forgotten their static shape.
        shaped = [with_shape_of(g, v) for g, v in zip(gradients, variables, strict=True)]
        shaped = [mark_common(gradient, self.rows) for gradient in shaped]
        if self.powersgd is None:
            return reduce_gradients(self.collectives, shaped, numbers, weight, self.order)
        reduced, numbers, self.remainder = self.powersgd.reduce(
            self.collectives, shaped, variables, numbers, weight, self.order, scale
        )
        return reduced, numbers

    def groups(self, variables: Sequence[Any]) -> list[list[int]]:
        """Positions of variables, in groups that are each reduced by themselves: the rounding of
        a sum depends on its place in a message."""
        return [list(range(len(variables)))]

    def _weight_batch_gradients(self, gradients: list[Any]) -> bool:
        """Weight this batch's gradients in place if earlier steps have accumulated others, which
        count on a rank without rows, too. Return whether there are such."""
        if present_graph() is None:
            return False  # an eager step is not followed
        of_batch = [
            g is None
            or self.flow.changes(g) is not None
            or depends_on_batch(getattr(g, "values", g), self.graph)
            for g in gradients
        ]
        if all(of_batch):
            return False
        for i, gradient in enumerate(gradients):
            if gradient is not None and of_batch[i]:
                gradients[i] = weighted(gradient, self.weight)
        return True

    def _weigh_local(
        self, gradients: list[Any], variables: list[Any], weight: tf.Tensor
    ) -> list[int]:
        """Weight the gradients of local variables in place; return which these are."""
        pairs = enumerate(zip(gradients, variables, strict=True))
        own = [i for i, (g, v) in pairs if g is not None and id(v) in self.local]
        for i in own:
            gradients[i] = weighted(gradients[i], weight)
        return own


@contextmanager
def tracing(context: StepContext) -> Iterator[None]:
    """Let `current_step()` be `context`, in this thread and in those of its replicas."""
    with entered_in_this_thread(context):
        yield


def current_step() -> StepContext | None:
    """The context of the step that this thread traces now; None outside of steps, and in the steps
    of one process, which need none."""
    for scope in reversed(entered_here()):
        if isinstance(scope, TracedContext):
            return cast(StepContext, scope)
    return None


def single_process_step() -> Any:
    """Within it a step is one process's, which communicates with no other: to make variables."""
    return tracing(StepContext(tf.ones([], tf.float64)))


def with_shape_of(gradient: Any, variable: Any) -> Any:
    """A dense gradient with its variable's static shape; an IndexedSlices as it is."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.ensure_shape(gradient, variable.shape)
