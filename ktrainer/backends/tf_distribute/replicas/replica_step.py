"""One step of a model on all replicas of this process.

`strategy.run` calls the step once for each replica, in threads that take turns; a TPU's calls it
once for all, and its replicas learn their numbers when they run. So each is handed its number, a
tensor there, with its part of the batch. What a replica does to the model's variables must not
happen at once, for they are shared:

    weights      `optimizer.apply` meets the other replicas', and is run once for all of them,
                 with gradients already summed
    statistics   assigned to a scope of the replica's own; their weighted mean is assigned after
    metrics      go on from their values in that scope; what is added there is added up after.
                 Metrics that do not add up are updated with each replica's outputs, one after
                 another
    seeds        every replica draws its own numbers from the same state
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.replicas.merge_outputs import (
    ReplicaOutcome,
    joined_logs,
    over_replicas,
)
from ktrainer.backends.tf_distribute.replicas.replica_batches import parts_of, spread
from ktrainer.backends.tf_distribute.replicas.replica_metrics import metrics_of_replicas
from ktrainer.backends.tf_distribute.replicas.replica_scopes import (
    ReplicaContexts,
    ReplicaScope,
    averages_of_own_rows,
    leave_weight,
    refuse_weight,
    traced_on_replicas,
    with_settings_of_this_thread,
)
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.steps import optimizers_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.loss_scope import gather_loss_inputs
from ktrainer.steps.metric_logs import LoggedResults
from ktrainer.steps.metric_states import (
    leaf_metrics,
    unadded_metrics,
    warn_of_assigned_states,
    warn_of_unlisted,
)
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.step_helpers import (
    check_applied,
    is_uniform,
    rows_of,
    warn_of_statistic,
    warn_of_weight,
)
from ktrainer.steps.update_guard import LossOfStep, check_one_update

Step = Callable[[Any], Any]
OldAndNew = tuple[list[tf.Tensor], list[tf.Tensor]]


@dataclass
class AssignedByStep:
    """The variables that a step assigns, the same on all replicas.

    Attributes:
        statistics: those that are neither weights nor in `metrics`.
        metrics: those of metrics whose values on parts of the data add up, and the constants that
            the step has set them to before it adds; None: to none.
    """

    statistics: list[Any] = field(default_factory=list)
    metrics: list[tuple[Any, np.ndarray | None]] = field(default_factory=list)


class Replicas:
    """The replicas of this process, and how a step runs on them.

    Args:
        strategy: whose replicas they are.
        model: a built model, its variables in the strategy.
        collectives: sums over the replicas of all processes; None where there is one.
        count: replicas in this process.
        first: number of the first of them among those of all processes.
        loss_scope: as in `StepOptions`.

    Attributes:
        one_trace: whether all replicas run one program, traced once and compiled with XLA.
        in_one_process: whether there are no replicas in other processes.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        collectives: GradientCollectives | None,
        count: int,
        first: int = 0,
        loss_scope: str = "local",
    ) -> None:
        self.strategy, self.model, self.collectives = strategy, model, collectives
        self.count, self.first, self.loss_scope = count, first, loss_scope
        self.one_trace = isinstance(strategy, tf.distribute.TPUStrategy)
        self.in_one_process = collectives is None or collectives.size == count
        self.contexts = ReplicaContexts(lambda value: self.local(value)[0])
        self._entered: dict[int, StepContext] = {}

    def run(
        self,
        step: Step,
        batch: Any,
        counts: tf.Tensor,
        *,
        xla: bool = False,
        applies: bool = False,
        metrics: bool = True,
        **settings: Any,
    ) -> ReplicaOutcome:
        """Run `step` on each replica's rows of `batch`.

        Args:
            step: a model's step, of one batch.
            batch: this process's rows; padding when it has none.
            counts: float64 vector: true rows of `batch`, and those of the whole update.
            xla: compile the step, without what it communicates, with XLA.
            applies: whether the step has to apply an optimizer.
            metrics: whether the model's metrics count.
            settings: more for each replica's `StepContext`; its list of denominators is made by
                `make_denominators`.
        """
        if metrics:
            warn_of_assigned_states(leaf_metrics(self.model))
        counted = [(v, self._start_of(v, metrics)) for v in self._added_metrics()]
        assigned = AssignedByStep()
        settings.setdefault("uniform", is_uniform(batch))

        def on_replica(number: Any, part: Any) -> Any:
            rows, weight = part
            context = self._context(number, weight, xla=xla, rows=rows_of(rows), **settings)
            values, statistics, added = self._computed(
                context, lambda: step(rows), counted, assigned
            )
            if applies:
                self._check_applied(context)
            bad = tf.constant(False) if context.bad is None else context.bad
            return values, context.weight, statistics, added, bad

        with (
            self._replica_patches(metrics and not xla),
            averages_of_own_rows(self.contexts, warns=applies),
        ):
            results = self._on_each(on_replica, parts_of(batch, counts, self.count))
        values, weights, statistics, added, bad = results
        metric_parts = zip(assigned.metrics, added, strict=True)
        return ReplicaOutcome(
            self.each(values),
            list(self.local(weights)),
            [(v, self.local(s)[0]) for v, s in zip(assigned.statistics, statistics, strict=True)],
            [(*each, self.local(parts)) for each, parts in metric_parts if metrics],
            self.local(bad)[0] if settings.get("guard") is not None else None,
        )

    def _check_applied(self, context: StepContext) -> None:
        """Refuse a step that applies no optimizer, or several where updates may be skipped."""
        check_applied(context, self.model)
        if context.guard is not None:
            check_one_update(context.applies, self.model)

    def _computed(
        self,
        context: StepContext,
        step: Callable[[], Any],
        counted: Sequence[tuple[Any, tf.Tensor]],
        assigned: AssignedByStep,
    ) -> tuple[Any, list[tf.Tensor], list[tf.Tensor]]:
        """Run a step on one replica.

        Args:
            counted: variables of metrics, and the values that are added to.
            assigned: filled with what the step assigns.

        Returns:
            What the step returns, the new values of statistics over all replicas, and what this
            replica adds to metrics.
        """
        added_to = {id(v) for v, _ in counted}

        def compute() -> tuple[Any, OldAndNew, OldAndNew]:
            with (
                self.contexts.entered(context),
                ReplicaScope(counted, self._weight_assigner(context), context.assigned) as scope,
            ):
                if context.guard is not None:
                    context.loss = LossOfStep(self.model)
                values = step()
            found = [] if context.record else list(scope.assigned.values())
            if context.collectives is not None:
                warn_of_unlisted(self.model, scope.assigned)
            statistics = assigned.statistics = [v for v in found if id(v) not in added_to]
            metrics = [v for v in found if id(v) in added_to]
            assigned.metrics = [(v, scope.constants.get(id(v))) for v in metrics]
            of_statistics, of_metrics = (_old_and_new(scope, vs) for vs in (statistics, metrics))
            new = [*of_statistics[1], *of_metrics[1]]
            for variable, value in zip([*statistics, *metrics], new, strict=True):
                warn_of_statistic(context, variable, value)
            return values, of_statistics, of_metrics

        if context.xla:
            compute = tf.function(compute, jit_compile=True, autograph=False)
        values, of_statistics, (starts, ends) = compute()
        added = [context.if_present(end - start) for start, end in zip(starts, ends, strict=True)]
        return values, over_replicas(context, assigned.statistics, *of_statistics), added

    def _weight_assigner(self, context: StepContext) -> Callable[[Any, Any], None]:
        """What is done with a value that a step assigns to a weight."""
        if context.record:  # nothing may change
            return leave_weight
        return refuse_weight if context.xla else self._assign_weight

    def conclude(self, outcome: ReplicaOutcome, logs: list[Any], logged: LoggedResults) -> Any:
        """Give the model's variables their new values; returns the logs of all replicas.

        Args:
            outcome: of a step that has run.
            logs: what it logs, on each replica of this process.
            logged: which of them are metrics' results.
        """
        outcome.assign()
        return joined_logs(logs, outcome.weights, logged.now(logs[0]))

    def apply(
        self,
        optimizer: Any,
        parts: list[Any],
        gradients: Callable[[Any], list[Any]],
        variables: list[Any],
        hooks: tuple[Any, ...],
    ) -> None:
        """Apply gradients that replicas have already weighted: sum them, once for all.

        Args:
            optimizer: what is applied.
            parts: of each replica of this process, what `gradients` makes its gradients of.
            gradients: those of a replica, from its part.
            variables: what they are of.
            hooks: functions of (gradients, variables) to run on the sums.
        """
        one = tf.constant(1.0, tf.float64)

        def on_replica(number: Any, part: Any) -> None:
            context = self._context(number, one, hooks=hooks)
            with self.contexts.entered(context):
                optimizer.apply(gradients(part), variables)

        with self._replica_patches(metrics=False):
            self._on_each(on_replica, parts)

    def add(self, function: Callable[[Any, Any], Any], a: list[Any], b: list[Any]) -> list[Any]:
        """Call `function` on each replica with its parts of `a` and `b`, where they are."""
        return self.each(
            self._on_each(lambda _, part: function(*part), list(zip(a, b, strict=True)))
        )

    def local(self, value: Any) -> list[Any]:
        """A value on each replica of this process."""
        parts = list(self.strategy.experimental_local_results(value))
        return parts if len(parts) == self.count else parts * self.count

    def each(self, structure: Any) -> list[Any]:
        """A nested structure of per-replica values, as one structure per replica."""
        return [
            keras.tree.map_structure(lambda value, i=i: self.local(value)[i], structure)
            for i in range(self.count)
        ]

    def _on_each(self, function: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
        """Call `function` on each replica, with its number in this process and its part."""
        args, unpack = spread(self.strategy, parts, self.first)

        def on_replica(number: Any, *leaves: Any) -> Any:
            return function(number, unpack(leaves))

        return self.strategy.run(with_settings_of_this_thread(on_replica), args=args)

    def _context(
        self,
        number: Any,
        weight: tf.Tensor,
        make_denominators: Callable[[], list[tf.Tensor]] | None = None,
        **settings: Any,
    ) -> StepContext:
        """The context of a replica.

        Args:
            number: which of this process it is; a tensor where all replicas are traced as one.
            weight: its part of the update.
            make_denominators, settings: as for `run`.
        """
        # Each replica takes its losses' denominators one after another, from a list of its own.
        denominators = None if make_denominators is None else make_denominators()
        context = StepContext(
            weight, self.collectives, self.first + number, denominators=denominators, **settings
        )
        context.merge_replicas = self.contexts.update_once
        if not self.one_trace:
            self._entered[number] = context
        return context

    def _assign_weight(self, variable: Any, value: Any) -> None:
        """Assign a weight in the middle of a step: the first replica's value, on all."""
        warn_of_weight(self.contexts.here, variable, value)
        value = self.contexts.of_first_replica(tf.convert_to_tensor(value))
        self.contexts.call_once(lambda first: variable.assign(first[0]), [value])

    def _start_of(self, variable: Any, is_read: bool) -> tf.Tensor:
        """What a replica adds to: the value of a metric's variable, which the step may read."""
        return tf.identity(variable.value) if is_read else tf.zeros(variable.shape, variable.dtype)

    def _added_metrics(self) -> list[Any]:
        """Variables of metrics whose values on parts of the data add up."""
        others = {id(v) for m in unadded_metrics(self.model) for v in m.variables}
        return [v for v in self.model.metrics_variables if id(v) not in others]

    @contextmanager
    def _replica_patches(self, metrics: bool) -> Iterator[None]:
        """Replace what must be different in Keras while a step is traced on replicas."""
        with ExitStack() as stack:
            contexts = self.contexts.as_one()
            stack.enter_context(keras_patches(contexts, optimizers_of(self.model)))
            stack.enter_context(gather_loss_inputs(contexts, self.model, self.loss_scope))
            stack.enter_context(traced_on_replicas(self.contexts, self.count))
            if metrics:
                stack.enter_context(
                    metrics_of_replicas(self.model, self.contexts, self._entered, self.each)
                )
            yield


def _old_and_new(scope: ReplicaScope, variables: Sequence[Any]) -> OldAndNew:
    """The values of variables before a step that has run in a scope, and after it."""
    return list(map(scope.before, variables)), list(map(scope.get_current_value, variables))
