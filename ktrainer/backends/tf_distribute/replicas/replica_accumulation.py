"""Gradient accumulation on replicas, and steps compiled with XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.replicas.replica_step import Replicas
from ktrainer.steps.metric_logs import LoggedResults
from ktrainer.steps.metric_states import require_sums
from ktrainer.steps.program_interface import LocalBatchLike
from ktrainer.steps.step_helpers import is_uniform, python_step
from ktrainer.steps.step_options import StepOptions
from ktrainer.steps.update_in_parts import (
    GradientParts,
    Tensors,
    UpdateInParts,
    count_denominators,
    total_denominators,
)

BATCH_COUNTS = tf.TensorSpec([2], tf.float64)
ReplicaPart = tuple[Any, Any]  # a batch; its true rows, and those of the whole update


class ReplicaAccumulation(UpdateInParts[ReplicaPart]):
    """Updates from several local batches, or compiled with XLA.

    Args:
        model: a built model, its variables in the strategy.
        options: how steps run.
        replicas: where they run.
        spec: of the data, nested `tf.TensorSpec`; one batch alone may be of one length.
        logged: which of the step's logs are metrics' results.
        compiled: compile each phase for itself; False leaves that to the caller.

    Raises:
        ModelError: XLA, and a metric that must see the outputs of all replicas.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: Replicas,
        spec: Any,
        logged: LoggedResults,
        compiled: bool = True,
    ) -> None:
        self.model, self.options, self.replicas = model, options, replicas
        self._logged, self._spec, self._compiled = logged, spec, compiled
        self._gradients = GradientParts(model)
        self._functions: dict[str, Any] = {}
        if options.xla:
            why = "each replica's outputs must go through them in turn, which XLA cannot compile"
            require_sums(model, why, "trainer.xla=false")

    def count(self, part: ReplicaPart) -> tf.Tensor:
        return self.phase("count", BATCH_COUNTS)(*part)

    def compute(self, part: ReplicaPart, denominators: tf.Tensor) -> tuple[Any, list[Tensors]]:
        counted = tf.TensorSpec(denominators.shape, tf.float64)
        logs, gradients = self.phase("compute", BATCH_COUNTS, counted)(*part, denominators)
        return logs, gradients

    def add(self, total: list[Tensors], more: list[Tensors]) -> list[Tensors]:
        """The sums on each replica, there where they are."""
        sums: list[Tensors] = self.phase("add")(total, more)
        return sums

    def apply(self, parts: Sequence[ReplicaPart], total: list[Tensors], logs: Any) -> Any:
        self.phase("update")(total)
        return logs

    def phase(self, name: str, *specs: Any) -> Any:
        """The function of a phase, compiled at first use: for any number of rows, which must not
        look like a constant.

        Args:
            name: "count", "compute", "add" or "update".
            specs: of its arguments after the batch, if it has one.
        """
        if name not in self._functions:
            function = getattr(self, f"_{name}")
            if self._compiled:
                function = tf.function(function, reduce_retracing=True, autograph=False)
                if specs and self._spec is not None:
                    function.get_concrete_function(self._spec, *specs)
            self._functions[name] = function
        return self._functions[name]

    def _count(self, batch: Any, counts: tf.Tensor) -> tf.Tensor:
        """The denominators of one local batch, summed over all replicas."""

        def count(rows: Any) -> tf.Tensor:
            context = self.replicas.contexts.here
            step = python_step(self.model.train_step)
            counted = count_denominators(context, lambda: step(rows))
            if context.collectives is None:
                return counted
            collectives, order = context.collectives, context.order
            return total_denominators([counted], lambda local: collectives.sum(local, order))

        settings = self._settings(batch)
        outcome = self.replicas.run(
            count, batch, counts, metrics=False, record=True, make_denominators=list, **settings
        )
        return outcome.values[0]

    def _compute(self, batch: Any, counts: tf.Tensor, denominators: tf.Tensor) -> Any:
        """The logs of one local batch, and the gradients that each replica has of it."""
        replicas = self.replicas
        step = self._logged.noting(
            python_step(self.model.train_step), replicas.contexts, replicas.in_one_process
        )

        def compute(rows: Any) -> tuple[Any, Tensors]:
            logs = step(rows)
            return logs, self._gradients.take(self.replicas.contexts.here)

        with self._logged.recording():
            outcome = self.replicas.run(
                compute,
                batch,
                counts,
                xla=self.options.xla,
                applies=True,
                make_denominators=lambda: tf.unstack(denominators),
                **self._settings(batch),
            )
        logs = self.replicas.conclude(outcome, [v[0] for v in outcome.values], self._logged)
        return logs, [v[1] for v in outcome.values]

    def _add(self, total: list[Tensors], more: list[Tensors]) -> list[Any]:
        return self.replicas.add(self._gradients.add, total, more)

    def _update(self, total: list[Tensors]) -> None:
        optimizer, variables = self._gradients.optimizer, self._gradients.variables
        hooks = self.options.all_hooks()
        self.replicas.apply(optimizer, total, self._gradients.whole, variables, hooks)

    def _settings(self, batch: Any) -> dict[str, Any]:
        return {"uniform": is_uniform(batch if self._spec is None else self._spec), "capture": True}


def batch_counts(local_batches: Sequence[LocalBatchLike]) -> list[np.ndarray]:
    """For each local batch of one update: its true rows, and those of the whole update."""
    examples = sum(each.global_examples for each in local_batches)
    return [np.array([each.examples, examples], np.float64) for each in local_batches]
