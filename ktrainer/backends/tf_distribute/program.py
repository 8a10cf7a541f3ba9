"""A model's steps under a synchronous strategy: local batches in, logs as tensors out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.move_into_strategy import move_in
from ktrainer.backends.tf_distribute.replicas.merge_outputs import joined_outputs
from ktrainer.backends.tf_distribute.replicas.replica_accumulation import (
    BATCH_COUNTS,
    ReplicaAccumulation,
    batch_counts,
)
from ktrainer.backends.tf_distribute.replicas.replica_batches import on_host
from ktrainer.backends.tf_distribute.replicas.replica_step import Replicas
from ktrainer.data.batch_specs import spec_of
from ktrainer.data.local_batch import require_examples
from ktrainer.errors import ModelError
from ktrainer.state.nested_logs import LogPath
from ktrainer.steps import CompiledProgram, StepOptions
from ktrainer.steps.assertions import error_of_split, explain_assertions
from ktrainer.steps.compiled_program import on_tensors, trace
from ktrainer.steps.compiled_step import CompiledStep, graphs_of
from ktrainer.steps.loss_scope import refuse_xla
from ktrainer.steps.metric_logs import LoggedResults, LogSource
from ktrainer.steps.metric_states import require_sums, unadded_metrics
from ktrainer.steps.move_out_of_strategy import generation, unwrap_variables
from ktrainer.steps.program_interface import LocalBatchLike, Logs, Program
from ktrainer.steps.step_helpers import global_seed, local_output, python_step
from ktrainer.steps.train_many import StepLoop, can_loop, stack_local_batches

_ONE_DEVICE = "Set backend.devices=1, which is one replica, or backend=local"


class ReplicatedProgram(Program):
    """The compiled steps of one model on all replicas of this process.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        replicas: where they run.
        guard: makes the context in which steps run, which explains errors of other processes.
        agree: whether a flag is true on any process; all of them call it together.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: Replicas,
        guard: Callable[[], AbstractContextManager[None]],
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        if replicas.one_trace:  # compiled by XLA, as always on a TPU
            options = replace(options, xla=False)
        refuse_xla(options, replicas.collectives)
        self.model, self.options, self.replicas, self.guard = model, options, replicas, guard
        self._agree = agree
        self._generation = generation()
        # Makes the variables, which then move into the strategy.
        self._maker = CompiledProgram(model, options)
        self._specs: dict[str, Any] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._accumulated: ReplicaAccumulation | None = None
        self._logged = {kind: LoggedResults(model) for kind in ("train", "test")}

    def build(self, spec: Any, training: bool = True) -> None:
        kind = "train" if training else "test"
        if self._specs.get(kind) is spec:
            return
        global_seed()  # else each replica would make one while it is traced, without a value
        self._specs[kind] = spec
        kept = {*self._functions} - {"test"} if not training else {"test", "predict"}
        self._functions = {k: f for k, f in self._functions.items() if k in kept}
        if training:
            self._accumulated = None
        self._place(self._maker.is_built(training), lambda: self._maker.build(spec, training))
        if self.replicas.one_trace:
            self._check_traceable()

    def _prepare_for(self, *local_batches: LocalBatchLike) -> None:
        """Check that the replicas of this process can run the batches."""
        self._renew()
        if self.replicas.count > 1:
            for local_batch in local_batches:
                require_examples(local_batch.batch, 0, self.replicas.count, _ONE_DEVICE)

    def train(self, local_batches: Sequence[LocalBatchLike]) -> Logs:
        self._prepare_for(*local_batches)
        if self.options.accumulate == 1 and not self.options.xla:
            with self._explained(local_batches):
                counts = batch_counts(local_batches)[0]
                return self._function("train")(self._on_host(local_batches[0].batch), counts)
        if self._accumulated is None:
            self._accumulated = ReplicaAccumulation(
                self.model,
                self.options,
                self.replicas,
                self._specs.get("train"),
                self._logged["train"],
            )
        with self._explained(local_batches):
            pairs = zip(local_batches, batch_counts(local_batches), strict=True)
            return self._accumulated(
                [(self._on_host(each.batch), counts) for each, counts in pairs]
            )

    def train_many(
        self,
        local_batches: Sequence[LocalBatchLike],
        ends_at_bad_loss: bool = False,
        all_logs: bool = False,
    ) -> list[Logs]:
        self._prepare_for(*local_batches)
        ends = ends_at_bad_loss and self.replicas.in_one_process  # else processes would end apart
        step = self._function("train")
        if self.options.xla or not can_loop(step, all_logs):
            return super().train_many(local_batches, ends, all_logs)
        stacked = self._stacked(local_batches)
        # Sums are numbered as functions are called: all processes must call the same ones.
        if self._agree(stacked is None) or stacked is None:
            return super().train_many(local_batches, ends, all_logs)
        key = ("many", ends, all_logs)
        if key not in self._functions:
            self._functions[key] = StepLoop(step, ends, all_logs)
        with self._explained(local_batches):
            logs: list[Logs] = self._functions[key](*stacked)
        return logs

    def test(self, local_batch: LocalBatchLike) -> Logs:
        self._prepare_for(local_batch)
        with self._explained([local_batch]):
            return self._function("test")(
                self._on_host(local_batch.batch), *batch_counts([local_batch])
            )

    def predict(self, local_batch: LocalBatchLike) -> Any:
        self._prepare_for(local_batch)
        self._place_for_prediction(local_batch)
        with self._explained([local_batch]):
            counts = batch_counts([local_batch])
            outputs = self._function("predict")(self._on_host(local_batch.batch), *counts)
        return keras.tree.map_structure(local_output, outputs)

    @property
    def graphs(self) -> list[Any]:
        return graphs_of([self._functions.get("train")])

    def sources(self, kind: Literal["train", "test"]) -> Mapping[LogPath, LogSource | None]:
        return self._logged[kind].sources

    def _on_host(self, batch: Any) -> Any:
        """`batch`, in host memory if it is cut there, for several replicas."""
        return batch if self.replicas.count == 1 else on_host(batch)

    def _stacked(self, local_batches: Sequence[LocalBatchLike]) -> tuple[Any, np.ndarray] | None:
        with tf.device("CPU:0") if self.replicas.count > 1 else nullcontext():
            stacked = stack_local_batches(local_batches, lambda each: batch_counts([each])[0])
        return stacked and (self._on_host(stacked[0]), stacked[1])

    @contextmanager
    def _explained(self, local_batches: Sequence[LocalBatchLike]) -> Iterator[None]:
        """Context in which a step runs, and its errors are explained."""
        try:
            with self.guard(), explain_assertions():
                yield
        except tf.errors.OpError as error:
            cause = error_of_split(error, local_batches, self.replicas.count, f"s{_ONE_DEVICE[1:]}")
            if cause is not None:
                raise cause from error
            raise

    def _function(self, kind: str) -> Callable[..., Any]:
        """The compiled step, made at first use."""
        if kind not in self._functions:
            step = self._predict if kind == "predict" else self._traced(kind)
            if self.model.run_eagerly:
                traced = on_tensors(step)
            else:
                specs = [self._specs[kind], BATCH_COUNTS] if kind in self._specs else []
                traced = CompiledStep(step, *specs)
            self._functions[kind] = traced
        return self._functions[kind]

    def _traced(self, kind: str) -> Callable[..., Any]:
        training = kind == "train"
        if training and self.options.guard is not None:
            check_metrics(self.model)
        logged = self._logged[kind]
        step = logged.noting(
            python_step(self.model.train_step if training else self.model.test_step),
            self.replicas.contexts,
            self.replicas.in_one_process,
        )

        def on_all(batch: Any, counts: tf.Tensor) -> Any:
            settings: dict[str, Any] = {}
            if training:
                settings = {"hooks": self.options.all_hooks(), "guard": self.options.guard}
            with logged.recording():
                outcome = self.replicas.run(step, batch, counts, applies=training, **settings)
            return self.replicas.conclude(outcome, outcome.values, logged)

        return on_all

    def _predict(self, batch: Any, counts: tf.Tensor) -> Any:
        step = python_step(self.model.predict_step)
        outcome = self.replicas.run(step, batch, counts, metrics=False)
        for variable, value in outcome.statistics:  # the states of random layers
            variable.assign(value)
        return joined_outputs(outcome.values, tf.cast(counts[0], tf.int64))

    def _place_for_prediction(self, local_batch: LocalBatchLike) -> None:
        """Move the variables that `predict` needs, at its first call."""
        if "predict" not in self._functions:
            built = all(layer.built for layer in self.model._flatten_layers())
            spec = spec_of(local_batch.batch)
            self._place(built, lambda: trace(self.model.predict_step, spec))

    def _place(self, built: bool, build: Callable[[], None]) -> None:
        """Move the model's variables into the strategy; make missing ones first."""
        strategy = self.replicas.strategy
        if not built or self._generation != generation():
            self._forget_compiled()
        if not built:
            # Tracing cannot make variables inside of a strategy.
            unwrap_variables(self.model)
            build()
        move_in(self.model, strategy)
        self._generation = generation()

    def _check_traceable(self) -> None:
        """Refuse what a TPU cannot do, whose replicas are one program.

        Raises:
            ModelError: a metric must see the replicas' outputs in turn, or steps are not compiled.
        """
        why = "each replica's outputs must go through them in turn, which a TPU cannot compile"
        require_sums(self.model, why, "choose another strategy")
        if self.model.run_eagerly:
            raise ModelError(
                "a TPU runs compiled steps only: compile the model with run_eagerly=False, or "
                "choose another strategy."
            )

    def _renew(self) -> None:
        """Compile again if the model has been moved elsewhere, such as by another Trainer."""
        if self._generation != generation():
            self._place(True, lambda: None)

    def _forget_compiled(self) -> None:
        """Forget compiled steps: they hold variables that are about to be moved."""
        self._functions.clear()
        self._accumulated = None


def check_metrics(model: keras.Model) -> None:
    """Refuse metrics that cannot be restored when an update is skipped.

    Raises:
        ModelError: there are some.
    """
    if names := [metric.name for metric in unadded_metrics(model)]:
        raise ModelError(
            f"the states of {', '.join(names)} are not known to add up, so the counts of a "
            "skipped update cannot be removed. Set `state_adds_up = True` "
            "on the metric's class if they do, or health.nan and health.on_spike to stop or "
            "rollback."
        )
