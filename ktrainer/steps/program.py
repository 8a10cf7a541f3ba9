"""A model's steps, compiled: shares in, logs out as tensors, unread.

Three ways to run an update, from the simplest that will do:

    plain      one process, one share an update: the model's own `train_step`, compiled
    inline     several ranks: the same, and gradients are reduced where the optimizer is applied
    captured   accumulation, or XLA with several ranks: `train_step` is run for each share with
               the gradients taken out of it; they are added up, reduced once, and applied
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from ktrainer.step_logs import LogPath
from ktrainer.steps.assertions import explain_assertions
from ktrainer.steps.base import Logs, Steps
from ktrainer.steps.captured import CapturedUpdate
from ktrainer.steps.context import StepContext, single_process_step
from ktrainer.steps.guard import Before, check_one_update
from ktrainer.steps.logged import LoggedResults, Source
from ktrainer.steps.loss_scope import gather_loss_inputs, refuse_xla
from ktrainer.steps.model_step import (
    ShareLike,
    average_statistics,
    check_applied,
    is_uniform,
    python_step,
    rows_of,
)
from ktrainer.steps.multi import compile_many, stack_shares
from ktrainer.steps.optimizers import optimizers_of
from ktrainer.steps.options import StepOptions
from ktrainer.steps.seams import seams
from ktrainer.world.plane import GradientPlane


class Program(Steps):
    """The compiled steps of one model on this rank.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        plane: sums over ranks; None in one process.
        rank: this process's number.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        plane: GradientPlane | None = None,
        rank: int = 0,
    ) -> None:
        refuse_xla(options, plane)
        self.model, self.options, self.plane, self.rank = model, options, plane, rank
        self._functions: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._specs: dict[str, Any] = {}
        self._captured: CapturedUpdate | None = None
        self._logged = {kind: LoggedResults(model) for kind in ("train", "test")}

    def build(self, spec: Any, training: bool = True) -> None:
        """Create all variables by tracing, without running a step.

        Call it again with a wider `spec` when a batch of a new shape appears; every rank must do
        so at the same step, since the shapes decide which denominators are communicated.

        Args:
            spec: nested `tf.TensorSpec` of a share, the batch dimension None.
            training: build what `train` needs (optimizer slots too), else what `test` needs.
        """
        kind = "train" if training else "test"
        if self._specs.get(kind) is spec:
            return
        known, self._specs[kind] = self._specs.get(kind), spec
        if known == spec:  # of another feed
            return
        self._functions = {k: f for k, f in self._functions.items() if k[0] not in (kind, "many")}
        if training:
            self._captured = None
        if not self.is_built(training):
            self._make_variables(spec, training)

    def train(self, shares: Sequence[ShareLike]) -> Logs:
        """One update of the weights from its shares (one, unless gradients accumulate)."""
        if self.options.accumulate == 1 and not (self.options.xla and self.plane):
            (share,) = shares
            return self._call(
                self._function("train", share.examples == 0), share.batch, _weight(share)
            )
        if self._captured is None:
            spec = self._specs.get("train")
            uniform = None if spec is None else is_uniform(spec)
            self._captured = CapturedUpdate(
                self.model, self.options, self.plane, self.rank, uniform, self._logged["train"]
            )
        captured = self._captured
        return self._call(captured, shares)

    def train_many(self, shares: Sequence[ShareLike]) -> Logs:
        """One update per share, all in one compiled call; the logs of the last."""
        # Under XLA with ranks a call holds no more than one share's computation.
        alone = len(shares) == 1 or (self.options.xla and self.plane is not None)
        stacked = None if alone else stack_shares(shares, _weight)
        if stacked is None:
            for share in shares:
                logs = self.train([share])
            return logs
        key = ("many", False)
        if key not in self._functions:
            self._functions[key] = compile_many(self._function("train", shares[0].examples == 0))
        return self._call(self._functions[key], *stacked)

    def sources(self, kind: Literal["train", "test"]) -> Mapping[LogPath, Source | None]:
        if self.plane is not None and kind in self._specs and not self._logged[kind].logs:
            self._function(kind, blank=False)  # a newcomer has not traced it yet
        return self._logged[kind].sources

    def abandon(self) -> None:
        if self._captured is not None:
            self._captured.abandon()

    def test(self, share: ShareLike) -> Logs:
        """Loss and metrics of one share, the weights left as they are."""
        return self._call(self._function("test", share.examples == 0), share.batch, _weight(share))

    def predict(self, share: ShareLike) -> Any:
        """The model's outputs for one share's true examples, as NumPy arrays."""
        outputs = self._call(
            self._function("predict", share.examples == 0), share.batch, _weight(share)
        )
        return keras.tree.map_structure(lambda t: t.numpy()[: share.examples], outputs)

    def is_built(self, training: bool) -> bool:
        """Whether all variables are there that `train`, or `test`, needs."""
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

    def _function(self, kind: str, blank: bool) -> Callable[..., Any]:
        """The compiled step for shares of examples, or for padding, made at first use."""
        key = (kind, blank)
        if key not in self._functions:
            step = {
                "train": self.model.train_step,
                "test": self.model.test_step,
                "predict": self.model.predict_step,
            }[kind]
            traced = self._traced(python_step(step), kind, blank)
            if self.model.run_eagerly:
                traced = on_tensors(traced)
            else:
                xla = self.options.xla and self.plane is None
                traced = tf.function(
                    traced, jit_compile=xla or None, reduce_retracing=True, autograph=False
                )
                if kind in self._specs:
                    traced.get_concrete_function(self._specs[kind], tf.TensorSpec([], tf.float64))
            self._functions[key] = traced
        return self._functions[key]

    def _traced(self, step: Callable[..., Any], kind: str, blank: bool) -> Callable[..., Any]:
        hooks = self.options.all_hooks()
        guard = self.options.guard if kind == "train" else None
        if kind == "predict" or (self.plane is None and not hooks and guard is None):
            return lambda batch, weight: step(batch)
        logged = self._logged[kind]

        def distributed(batch: Any, weight: tf.Tensor) -> Any:
            context = StepContext(
                weight,
                self.plane,
                self.rank,
                uniform=is_uniform(batch),
                hooks=hooks,
                rows=rows_of(batch),
            )
            if not self.options.average and self.plane is not None:
                context.gradient_weight = weight * self.plane.size
                context.times = self.plane.size
            kept = [(v, tf.identity(v)) for v in self.model.metrics_variables] if blank else []
            before = Before(self.model) if guard is not None else None
            if before is not None:
                context.guard, context.loss = guard, before.loss
            with (
                seams(context, optimizers_of(self.model)),
                gather_loss_inputs(context, self.model, self.options.loss_scope),
                logged.recording(),
            ):
                logs = logged.noting(step)(batch)
            if kind == "train":
                check_applied(context, self.model)
                average_statistics(context, self.model)
            for variable, value in kept:  # padding must not be counted
                variable.assign(value)
            if before is not None and context.bad is not None:
                check_one_update(context.applies, self.model)
                before.put_back(context.bad, context.assigned)
                logs = before.logs(context.bad, logs, logged)
            return logs

        return distributed

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            with explain_assertions():
                return function(*args)
        except tf.errors.OpError as error:
            cause = self.plane.failure(error) if self.plane is not None else None
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
    own = python_step(step)
    with single_process_step():
        tf.function(lambda batch: own(batch), autograph=False).get_concrete_function(spec)


def _weight(share: ShareLike) -> np.float64:
    return np.float64(share.examples / max(share.global_examples, 1))
