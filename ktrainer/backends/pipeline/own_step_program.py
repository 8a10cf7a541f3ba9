"""A model's own `train_step`, `test_step` or `predict_step` over stages.

Each process of a replica runs the whole step, on the whole local batch, as under data_parallel;
calls of the model go through the stages, in microbatches, and return its outputs everywhere. So the
step computes what it computes in one process, whatever that is, and each process gets, and applies,
the gradients of the variables that it holds.

    step in every process      self(x)  ->  all forward passes  ->  outputs of the whole batch
                               loss, metrics
                               tape.gradient(loss, self.trainable_variables)
                                        ->  all backward passes ->  gradients of this stage
                               optimizer.apply: summed over replicas, clipped over stages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from ktrainer.backends.pipeline.check_supported import (
    refuse_layers,
    refuse_penalty,
    refuse_settings,
)
from ktrainer.backends.pipeline.placement.moving_averages import held_averages
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.program import StageProgram
from ktrainer.backends.pipeline.runtime.compiled_model import synchronize_seeds
from ktrainer.backends.pipeline.runtime.global_norm import counting_over_stages
from ktrainer.backends.pipeline.runtime.model_call import (
    call_in_microbatches,
    inputs_of_call,
    single_input,
)
from ktrainer.backends.pipeline.runtime.stage_checks import (
    common_logs,
    refuse_combined,
    refuse_empty_stages,
    refuse_shared_statistics,
)
from ktrainer.backends.pipeline.runtime.stage_runner import StageRunner
from ktrainer.backends.pipeline.runtime.stage_update import StageUpdate
from ktrainer.backends.pipeline.runtime.transport import WaitTime
from ktrainer.config import PipelineConfig
from ktrainer.data.batch_specs import spec_of
from ktrainer.data.local_batch import count_rows
from ktrainer.distributed.collectives import GradientCollectives, InOrder
from ktrainer.errors import ModelError
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps import Clip, CompiledProgram, StepOptions
from ktrainer.steps.compiled_program import trace_once
from ktrainer.steps.program_interface import LocalBatchLike, Logs, Program
from ktrainer.steps.step_context import StepContext, current_step
from ktrainer.steps.step_helpers import STEPS, global_seed, python_step
from ktrainer.steps.step_options import GradientHook


class _StageContext(StepContext):
    """Surroundings of a step that applies the gradients of one stage.

    Attributes:
        holders: the partitions that hold each variable, by `id()`.
    """

    holders: Mapping[int, Sequence[int]]

    def reduce(self, gradients: list[Any], variables: list[Any], scale: Any = None) -> list[Any]:
        refuse_combined(gradients, variables)
        for group in self.groups(variables):
            if all(gradients[i] is None for i in group):
                continue
            found = super().reduce([gradients[i] for i in group], [variables[i] for i in group])
            for i, gradient in zip(group, found, strict=True):
                gradients[i] = gradient
        return gradients

    def groups(self, variables: Sequence[Any]) -> list[list[int]]:
        """Variables of the same holders: each of these has the group, and so the same bits."""
        found: dict[tuple[int, ...], list[int]] = {}
        for i, variable in enumerate(variables):
            found.setdefault(tuple(self.holders.get(id(variable), ())), []).append(i)
        return [found[key] for key in sorted(found)]


class OwnStepProgram(StageProgram, CompiledProgram):
    """The steps of a model's own, run whole in every process.

    Args:
        planned: the model; cut at the first call of `build`.
        options: how steps run.
        config: the backend's.
        stages: sums over the partitions of this replica; None for one.
        replicas: sums over the copies of this partition; None for one.
        waits: accumulates the time spent waiting for other stages.
    """

    context_type = _StageContext

    def __init__(
        self,
        planned: PlannedModel,
        options: StepOptions,
        config: PipelineConfig,
        stages: GradientCollectives | None,
        replicas: GradientCollectives | None,
        waits: WaitTime,
    ) -> None:
        refuse_settings(planned.model, options, config)
        replica = planned.layout.replica_of(planned.world.rank)
        super().__init__(planned.model, options, replicas, replica)
        self.planned, self.config, self._stages, self._waits = planned, config, stages, waits
        self._runner: StageRunner | None = None
        self._update: StageUpdate | None = None
        self._losses: list[Any] = []  # those of the model's last call in the step that is traced

    def build(self, spec: Any, training: bool = True) -> None:
        refuse_penalty(self.model)
        if training:
            refuse_layers(self.model)
        self._place("train" if training else "test", spec)
        super().build(spec, training)

    def train(self, local_batches: Sequence[LocalBatchLike]) -> Logs:
        self._choose(local_batches[0])
        logs = super().train(local_batches)
        placement = self.planned.placement
        held = [v for v in self.model.non_trainable_variables if placement.holds(v)]
        synchronize_seeds([*held, global_seed().state], self.model, placement.copies)
        return self._agreed(logs, "train_step")

    # Each update ends with messages between stages.
    train_many, can_train_many = Program.train_many, Program.can_train_many

    def test(self, local_batch: LocalBatchLike) -> Logs:
        self._choose(local_batch)
        return self._agreed(super().test(local_batch), "test_step")

    def predict(self, local_batch: LocalBatchLike) -> Any:
        self._place("predict", spec_of(local_batch.batch))
        self._choose(local_batch)
        outputs = super().predict(local_batch)
        return outputs if self.counts_metrics else None

    # -- the model, cut

    def _place(self, kind: str, spec: Any) -> None:
        """Cut the model, for the inputs with which a step calls it."""
        if self._runner is not None:
            return
        planned = self.planned
        if not planned.placed:
            planned.place((inputs_of_call(self.model, kind, spec),))
            refuse_shared_statistics(planned)
            refuse_empty_stages(planned)
        self._runner = runner = StageRunner(planned, self._waits)
        placement = planned.placement
        self._update = StageUpdate(
            self.model,
            runner.held,
            placement.owned,
            planned.sums,
            self.options,
            self._stages,
            None,
        )
        self.options = replace(self.options, hooks=self._update.hooks(), clip=Clip())

    def _context(
        self, batch: Any, weight: tf.Tensor, hooks: tuple[GradientHook, ...]
    ) -> StepContext:
        context = super()._context(batch, weight, hooks)
        assert isinstance(context, _StageContext)
        context.holders = self.planned.holders
        return context

    def _choose(self, local_batch: LocalBatchLike) -> None:
        """Choose the trace for as many microbatches as a batch can have."""
        self.variant = min(self.config.microbatches, count_rows(local_batch.batch))

    def _make_variables(self, spec: Any, training: bool) -> None:
        kind = "train" if training else "test"
        step = self._traced(python_step(getattr(self.model, STEPS[kind])), kind, padding=False)
        weight = tf.TensorSpec([], tf.float64)
        trace_once(step, spec, weight)

    def _traced(self, step: Callable[..., Any], kind: str, padding: bool) -> Callable[..., Any]:
        def in_stages(batch: Any) -> Any:
            with self._in_stages():
                return step(batch)

        return super()._traced(in_stages, kind, padding)

    @contextmanager
    def _in_stages(self) -> Iterator[None]:
        """Trace a step inside: the model's calls go through the stages, its trained variables are
        those that are held here, and so are those of its optimizer."""
        assert self._runner is not None
        assert self._update is not None
        model, placement = self.model, self.planned.placement
        self._losses = []

        def held(original: Any) -> property:
            return property(lambda layer: [v for v in original.fget(layer) if placement.holds(v)])

        layer = keras.layers.Layer
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(
                replaced(
                    *((layer, n, held(getattr(layer, n))) for n in _TRAINED),
                    (layer, "losses", self._losses_of(layer.losses)),
                    (type(model), "__call__", self._call_of(type(model).__call__)),
                )
            )
            if model.optimizer is not None:
                enter(held_averages(model))
                enter(_applied_to(model.optimizer, self._runner.held))
            sums = self._update.sum
            enter(counting_over_stages(self._runner.held, placement.owned, sums))
            enter(self._update.over_stages())
            try:
                yield
            except ModelError as error:
                error.add_note(_NOTE)
                raise

    def _losses_of(self, original: Any) -> property:
        model = self.model
        return property(lambda layer: self._losses if layer is model else original.fget(layer))

    def _call_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`Layer.__call__`, through the stages for the model."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(args))
            if layer is not self.model or symbolic:
                return original(layer, *args, **kwargs)
            given, training = single_input(layer, args, kwargs)
            runner, context = self._runner, current_step()
            assert runner is not None
            runner.messages.order = InOrder() if context is None else context.order
            (inputs,) = self.planned.as_cut((given,))
            outputs, self._losses = call_in_microbatches(
                runner, inputs, training, self.variant, context
            )
            return outputs

        return call

    # -- calls

    def _call(
        self, local_batches: Sequence[LocalBatchLike], function: Callable[..., Any], *args: Any
    ) -> Any:
        assert self._runner is not None
        self._runner.start_step()
        try:
            result = super()._call(local_batches, function, *args)
        except tf.errors.OpError as error:
            cause = self._runner.messages.failure
            if cause is None and self._stages is not None:
                cause = self._stages.failure(error)
            if cause is not None:
                raise cause from error
            raise
        self._runner.end_step()
        return result

    def _agreed(self, logs: Logs, step: str) -> Logs:
        """The logs, which must be the same on all stages."""
        name = f"{type(self.model).__name__}.{step}"
        return common_logs(logs, self.planned.placement.model, name)


_TRAINED = ("trainable_variables", "trainable_weights")
_NOTE = (
    "This was raised in a step of the model's own under backend=pipeline. Every process of a "
    "replica runs the step; there it may call the whole model, `self(x)`, whose outputs have what "
    "the loss needs, but no layer of it, and read no weights but `self.trainable_variables`, which "
    "are those of its stage."
)


@contextmanager
def _applied_to(optimizer: Any, variables: Sequence[Any]) -> Iterator[None]:
    """Let `optimizer.apply(gradients)`, of no variables, mean those that are held here."""

    def apply(gradients: Any, trainable_variables: Any = None) -> Any:
        given = list(variables) if trainable_variables is None else trainable_variables
        return type(optimizer).apply(optimizer, gradients, given)

    optimizer.apply = apply
    try:
        yield
    finally:
        del optimizer.apply
