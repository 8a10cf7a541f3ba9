"""A model's compiled steps: local batches in, logs out as tensors, left on the device.

Three ways to run an update, from the simplest that will do:

    plain         one process, one local batch an update: the model's own `train_step`, compiled
    inline        several ranks: the same, and gradients are reduced where the optimizer is applied
    accumulated   several local batches an update: `train_step` is run for each with the gradients
                  taken out of it; they are added up, reduced and applied once

XLA compiles all of a step in one process; with several ranks, what lies between their collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.state.nested_logs import LogPath
from ktrainer.steps.accumulated_update import AccumulatedUpdate
from ktrainer.steps.assertions import error_of_split, explain_assertions
from ktrainer.steps.compiled_step import CompiledStep, graphs_of
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.local_layers import check_local_layers, local_variables
from ktrainer.steps.loss_scope import gather_loss_inputs, refuse_xla
from ktrainer.steps.metric_logs import LoggedResults, LogSource
from ktrainer.steps.metric_states import warn_of_unlisted
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.powersgd import powersgd_of
from ktrainer.steps.program_interface import LocalBatchLike, Logs, Program
from ktrainer.steps.step_context import StepContext, single_process_step
from ktrainer.steps.step_helpers import (
    average_statistics,
    check_applied,
    is_uniform,
    local_output,
    moved_by_padding,
    python_step,
    rows_of,
    summed_statistics,
    unmoved,
)
from ktrainer.steps.step_options import GradientHook, StepOptions
from ktrainer.steps.train_many import StepLoop, can_loop, stack_local_batches
from ktrainer.steps.update_guard import StateBeforeStep, check_one_update
from ktrainer.steps.xla_segments import compile_segments

_WEIGHT = tf.TensorSpec([], tf.float64)
_WHOLE_BATCHES = "set data.batch=per_worker, or train with backend=local"


class CompiledProgram(Program):
    """The compiled steps of one model on this rank.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        collectives: sums over ranks; None in one process.
        rank: this process's number.

    Attributes:
        variant: which trace of a step runs, where there are several.
    """

    context_type: type[StepContext] = StepContext

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        collectives: GradientCollectives | None = None,
        rank: int = 0,
    ) -> None:
        refuse_xla(options, collectives)
        self.model, self.options, self.collectives, self.rank = model, options, collectives, rank
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self.variant = 0
        self._specs: dict[str, Any] = {}
        self._accumulated: AccumulatedUpdate | None = None
        self._logged = {kind: LoggedResults(model) for kind in ("train", "test")}

    def build(self, spec: Any, training: bool = True) -> None:
        """Create all variables by tracing, without running a step.

        Call it again with a wider `spec` when a batch of a new shape appears; every rank must do
        so at the same step, since the shapes decide which denominators are communicated.

        Args:
            spec: nested `tf.TensorSpec` of a local batch, the batch dimension None.
            training: build what `train` needs (optimizer slots too), else what `test` needs.
        """
        kind = "train" if training else "test"
        if self._specs.get(kind) is spec:
            return
        known, self._specs[kind] = self._specs.get(kind), spec
        if known == spec:  # of other data
            return
        stale = ("train", "many") if training else ("test",)
        self._functions = {k: f for k, f in self._functions.items() if k[0] not in stale}
        if training:
            self._accumulated = None
        if not self.is_built(training):
            self._make_variables(spec, training)
        if training:
            check_local_layers(self.model)

    def train(self, local_batches: Sequence[LocalBatchLike]) -> Logs:
        """One update of the weights from its local batches (one, unless gradients accumulate)."""
        if self.options.accumulate == 1:
            (local_batch,) = local_batches
            return self._call(
                local_batches,
                self._function("train", local_batch.examples == 0),
                local_batch.batch,
                _weight(local_batch),
            )
        if self._accumulated is None:
            self._accumulated = AccumulatedUpdate(
                self.model,
                self.options,
                self.collectives,
                self.rank,
                self._specs.get("train"),
                self._logged["train"],
            )
        accumulated = self._accumulated
        return self._call(local_batches, accumulated, local_batches)

    def train_many(
        self,
        local_batches: Sequence[LocalBatchLike],
        ends_at_bad_loss: bool = False,
        all_logs: bool = False,
    ) -> list[Logs]:
        ends = ends_at_bad_loss and self.collectives is None  # else ranks would end apart
        step = self._function("train", padding=False)
        if not can_loop(step, all_logs):
            return super().train_many(local_batches, ends, all_logs)
        stacked = stack_local_batches(local_batches, _weight)
        if stacked is None:
            return super().train_many(local_batches, ends, all_logs)
        key = ("many", ends, all_logs, self.variant)
        if key not in self._functions:
            self._functions[key] = StepLoop(step, ends, all_logs)
        logs: list[Logs] = self._call(local_batches, self._functions[key], *stacked)
        return logs

    @property
    def can_train_many(self) -> bool:
        several = self.collectives is not None or self.options.accumulate > 1
        if several or self.options.guard is not None:
            return False
        return can_loop(self._function("train", padding=False))

    @property
    def graphs(self) -> list[Any]:
        if self._accumulated is not None:
            return self._accumulated.graphs
        return graphs_of([self._functions.get(("train", False, self.variant))])

    def sources(self, kind: Literal["train", "test"]) -> Mapping[LogPath, LogSource | None]:
        if self.collectives is not None and kind in self._specs and not self._logged[kind].logs:
            self._function(kind, padding=False)  # a rank that joined has not traced it yet
        return self._logged[kind].sources

    def abandon(self) -> None:
        if self._accumulated is not None:
            self._accumulated.abandon()

    def test(self, local_batch: LocalBatchLike) -> Logs:
        """Loss and metrics of one local batch, the weights left as they are."""
        function = self._function("test", local_batch.examples == 0)
        return self._call([local_batch], function, local_batch.batch, _weight(local_batch))

    def predict(self, local_batch: LocalBatchLike) -> Any:
        """The model's outputs for one local batch, as NumPy arrays or ragged tensors; of padding no
        rows. An output may have more rows than the batch: words of sentences, edges of graphs."""
        function = self._function("predict", local_batch.examples == 0)
        outputs = self._call([local_batch], function, local_batch.batch, _weight(local_batch))
        kept = slice(None) if local_batch.examples else slice(0)
        return keras.tree.map_structure(lambda t: local_output(t)[kept], outputs)

    def is_built(self, training: bool) -> bool:
        """Return whether all variables are there that `train`, or `test`, needs."""
        metrics = getattr(self.model, "_compile_metrics", None)
        loss = getattr(self.model, "_compile_loss", None)
        parts = [*self.model._flatten_layers(), *(p for p in (metrics, loss) if p is not None)]
        return all(part.built for part in parts) and (
            not training or all(o.built for o in optimizers_of(self.model))
        )

    def _make_variables(self, spec: Any, training: bool) -> None:
        """Trace a step only for the variables that Keras makes in it.

        Keras bakes the initial loss scale into a step whose optimizer is not yet built, so this
        trace is thrown away. With Keras' own steps that of testing, a third of the work, makes
        the same variables, unless a layer is only used in training.
        """
        model, keras_own = self.model, keras.Model
        stock = (type(model).train_step, type(model).test_step) == (
            keras_own.train_step,
            keras_own.test_step,
        )
        if stock or not training:
            trace(model.test_step, spec)
        if not training:
            return
        if stock and all(layer.built for layer in model._flatten_layers()):
            if model.optimizer is not None:
                model.optimizer.build(model.trainable_variables)
        else:
            trace(model.train_step, spec)

    def _function(self, kind: str, padding: bool) -> Callable[..., Any]:
        """The compiled step for local batches, or for padding, made at first use."""
        key = (kind, padding, self.variant)
        if key not in self._functions:
            step = {
                "train": self.model.train_step,
                "test": self.model.test_step,
                "predict": self.model.predict_step,
            }[kind]
            traced = self._traced(python_step(step), kind, padding)
            if self.model.run_eagerly:
                traced = on_tensors(traced)
            else:
                specs = [self._specs[kind], _WEIGHT] if kind in self._specs else []
                xla = self.options.xla
                if xla and self.collectives is not None:
                    traced, xla = compile_segments(traced), False
                traced = CompiledStep(traced, *specs, xla=xla)
            self._functions[key] = traced
        return self._functions[key]

    def _traced(self, step: Callable[..., Any], kind: str, padding: bool) -> Callable[..., Any]:
        hooks = self.options.all_hooks()
        guard = self.options.guard if kind == "train" else None
        if kind == "predict" and self.collectives is not None:
            return self._predicting(step)
        if kind == "predict" or (self.collectives is None and not hooks and guard is None):
            return lambda batch, weight: step(batch)
        logged = self._logged[kind]

        def distributed(batch: Any, weight: tf.Tensor) -> Any:
            context = self._context(batch, weight, hooks)
            before = StateBeforeStep(self.model) if guard is not None else None
            if before is not None:
                context.guard, context.loss = guard, before.loss
            with unmoved(moved_by_padding(self.model) if padding else []):
                with (
                    keras_patches(context, optimizers_of(self.model)),
                    gather_loss_inputs(context, self.model, self.options.loss_scope),
                    logged.recording(),
                    summed_statistics(context, self.model),
                ):
                    logs = logged.noting(step, context)(batch)
                if self.collectives is not None:
                    warn_of_unlisted(self.model, context.assigned)
                if kind == "train":
                    check_applied(context, self.model)
                    average_statistics(context, self.model)
            if before is not None and context.bad is not None:
                check_one_update(context.applies, self.model)
                before.restore(context.bad, context.assigned)
                logs = before.logs(context.bad, logs, logged)
            return logs

        return distributed

    def _predicting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step of prediction that draws other random numbers on each rank."""

        def predict(batch: Any, weight: tf.Tensor) -> Any:
            context = self.context_type(
                tf.ones([], tf.float64),
                None,
                self.rank,
                uniform=is_uniform(batch),
                rows=rows_of(batch),
                predicts=True,
            )
            with keras_patches(context):
                return step(batch)

        return predict

    def _context(
        self, batch: Any, weight: tf.Tensor, hooks: tuple[GradientHook, ...]
    ) -> StepContext:
        context = self.context_type(
            weight,
            self.collectives,
            self.rank,
            uniform=is_uniform(batch),
            hooks=hooks,
            rows=rows_of(batch),
            local=local_variables(self.model),
            powersgd=powersgd_of(self.model),
            xla=self.options.xla,
        )
        if not self.options.average and self.collectives is not None:
            context.gradient_weight = weight * self.collectives.size
            context.times = self.collectives.size
        return context

    def _call(
        self, local_batches: Sequence[LocalBatchLike], function: Callable[..., Any], *args: Any
    ) -> Any:
        try:
            with explain_assertions():
                return function(*args)
        except tf.errors.OpError as error:
            cause = self.collectives.failure(error) if self.collectives is not None else None
            cause = cause or error_of_split(error, local_batches, 1, _WHOLE_BATCHES)
            if cause is not None:
                raise cause from error
            raise


def on_tensors(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` for batches of NumPy arrays: an eager step expects tensors, as tracing gives."""

    def convert(part: Any) -> Any:
        return tf.convert_to_tensor(part) if isinstance(part, np.ndarray) else part

    return lambda batch, weight: step(keras.tree.map_structure(convert, batch), weight)


def trace(step: Callable[..., Any], spec: Any) -> None:
    """Trace a step and forget it; the variables that it made stay."""
    with single_process_step():
        trace_once(python_step(step), spec)


def trace_once(function: Callable[..., Any], *specs: Any) -> None:
    """Trace `function` for the variables that it makes.

    TensorFlow traces a function that makes variables a second time, to get one that can be called;
    that is not needed here.
    """
    is_traced = False

    def once(*args: Any) -> None:
        nonlocal is_traced
        if not is_traced:
            is_traced = True
            function(*args)

    tf.function(once, autograph=False).get_concrete_function(*specs)


def _weight(local_batch: LocalBatchLike) -> np.float64:
    return np.float64(local_batch.examples / max(local_batch.global_examples, 1))
