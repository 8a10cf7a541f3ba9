"""A model's steps as a pipeline: batches cut into microbatches, run by schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.pipeline.check_supported import refuse_layers, refuse_penalty
from ktrainer.backends.pipeline.placement.moving_averages import held_averages
from ktrainer.backends.pipeline.planned_model import PlannedModel
from ktrainer.backends.pipeline.runtime.compiled_model import (
    CompiledModel,
    synchronize_seeds,
)
from ktrainer.backends.pipeline.runtime.runner import Runner, StepOutcome, Values
from ktrainer.backends.pipeline.runtime.stage_checks import refuse_layer_metrics
from ktrainer.backends.pipeline.runtime.stage_update import StageUpdate
from ktrainer.backends.pipeline.runtime.tied_gradients import TiedGradients, densify
from ktrainer.backends.pipeline.runtime.transport import Transport, WaitTime
from ktrainer.backends.pipeline.schedules.actions import Schedule
from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.backends.pipeline.stage.global_loss import GlobalLoss
from ktrainer.backends.pipeline.stage.loss_head import build_metrics
from ktrainer.backends.pipeline.stage.microbatches import (
    Microbatch,
    cut_batches,
    leaves,
    with_leaves,
)
from ktrainer.backends.pipeline.stage.stage_settings import Mode, StageSettings
from ktrainer.config import PipelineConfig
from ktrainer.data.batch_specs import spec_of
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.state.nested_logs import flatten_paths, unflatten_paths
from ktrainer.steps import StepOptions
from ktrainer.steps.program_interface import LocalBatchLike, Logs, Program
from ktrainer.steps.step_helpers import is_uniform
from ktrainer.steps.update_guard import LossOfStep, UpdateGuard, scales_loss
from ktrainer.steps.update_in_parts import total_denominators


class StageProgram(Program):
    """Abstract program of a model of which this process holds a partition.

    Attributes:
        planned: the model; `model` is the same.
    """

    planned: PlannedModel

    @property
    def counts_metrics(self) -> bool:  # type: ignore[override]
        """True on the last partition: one that counts is enough."""
        return self.planned.is_last

    def check_unchanged(self) -> None:
        self.planned.check_unchanged()

    def finalize_weights(self) -> None:
        with held_averages(self.model) as weights:
            self.model.optimizer.finalize_variable_values(weights)


class PipelineProgram(StageProgram):
    """The steps of one model, by schedule.

    Args:
        planned: the model, cut and placed.
        options: how steps run.
        config: the backend's.
        stages: sums over the partitions of this replica; None for one.
        replicas: sums over the copies of this partition; None for one.
        waits: accumulates the time spent waiting for other stages.
        global_loss: compute the loss on the whole batch (trainer.loss_scope=global).
    """

    def __init__(
        self,
        planned: PlannedModel,
        options: StepOptions,
        config: PipelineConfig,
        stages: GradientCollectives | None,
        replicas: GradientCollectives | None,
        waits: WaitTime,
        global_loss: bool = False,
    ) -> None:
        self.planned, self.options, self.config = planned, options, config
        self.model = planned.model
        self.transport: Transport | None = None
        self._collectives = (stages, replicas)
        self._has_global_loss = global_loss
        self._global_loss: GlobalLoss | None = None
        self._schedules: dict[Any, Schedule] = {}
        self._sums, self._waits = planned.sums, waits
        self._sums.keep_memory = options.xla
        self._shapes: list[tuple[int | None, ...]] = []
        self._seen: dict[bool, Any] = {}
        self._metrics_built = False
        self._loss_of_step: LossOfStep | None = None
        self._before: dict[int, Any] = {}  # the state before the last step

    def build(self, spec: Any, training: bool = True) -> None:
        if self._seen.get(training) is not spec:
            refuse_penalty(self.model)
            if training:
                refuse_layers(self.model)
            self._build(spec)
            refuse_layer_metrics(self.planned)
            self._seen[training] = spec

    def _build(self, spec: Any, metrics: bool = True) -> None:
        spec = self.planned.as_cut(spec)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
        shapes = [tuple(leaf.shape) for leaf in leaves(inputs)]
        if self.transport is None:
            self._start(spec)
            self._shapes = shapes
            self._build_metrics(spec, metrics)
            return
        self._build_metrics(spec, metrics)
        # Wider than before, for training or for validation: the graph must do for both.
        wider = [_widened(*both) for both in zip(self._shapes, shapes, strict=True)]
        uniform = self._compiled.uniform and is_uniform(spec)
        if wider != self._shapes:
            specs = zip(wider, leaves(inputs), strict=True)
            widest = [tf.TensorSpec(shape, leaf.dtype) for shape, leaf in specs]
            self.planned.place((with_leaves(inputs, widest),))
            self._shapes = wider
        elif uniform == self._compiled.uniform:
            return
        self._compiled.forget(uniform)

    def _start(self, spec: Any) -> None:
        planned = self.planned
        planned.place(spec)
        trained = self.model.trainable_variables
        held = [v for v in trained if planned.placement.holds(v)]
        several = [v for v in trained if len(planned.holders[id(v)]) > 1]
        stages, replicas = self._collectives
        self.transport = Transport(
            planned.placement.model,
            len(planned.stages(True)),
            self._waits,
            channels=len(several),
        )
        self._shared = TiedGradients(several, planned.holders, self._sums, self.transport)
        if self._has_global_loss:
            self._global_loss = GlobalLoss(self.model, held, planned.placement.copies)
        self._compiled = CompiledModel(planned, self._settings(), self.transport, self._global_loss)
        self._compiled.forget(is_uniform(spec))
        self._runner = Runner(self.transport, self._shared)
        self._update = StageUpdate(
            self.model, held, planned.placement.owned, self._sums, self.options, stages, replicas
        )
        self._held = held

    def _settings(self) -> StageSettings:
        planned = self.planned
        return StageSettings(
            model=self.model,
            regularised=planned.regularised(),
            sums=self._sums,
            replica=planned.placement.replica,
            recompute=self.config.recompute,
            xla=self.options.xla,
            may_weigh_losses=planned.in_full_precision,
            global_loss=self._has_global_loss,
            split=self.config.microbatches > 1 or planned.placement.replicas > 1,
        )

    def _build_metrics(self, spec: Any, wanted: bool) -> None:
        """Create the variables of metrics, once; not for `predict`, whose data has no targets."""
        if wanted and not self._metrics_built:
            build_metrics(self.model, spec, self.planned.graph(True))
            self._metrics_built = True

    def train(self, batches: Sequence[LocalBatchLike]) -> Logs:
        microbatches = self._cut(batches)
        self._sums.begin()
        self._shared.begin()
        outcome = self._run("train", microbatches, self._loss_scale())
        slices = outcome.slices
        for variable in self._held:
            densify(variable, slices, self._sums)
        weight = sum(m.weight for m in microbatches)
        # Stages before this one may still compute: reduce what needs nothing from them first.
        shared = set(map(id, self._shared.variables))
        own = [v for v in self._held if id(v) not in shared]
        self._guarded(self._update.reduce, own, slices, weight, self._shared.variables)
        self._shared(slices)
        # In one call for all variables of the same holders: rounding depends on the position.
        for variables in self._shared.by_holders():
            self._guarded(self._update.reduce, variables, slices, weight)
        dense = {id(v) for v in self._held if self._sums.has(v)}
        guard = self.options.guard
        bad = guard is not None and self._is_bad(guard, slices, dense)
        # A loss scale checks itself for values that are not finite, and is halved.
        scale = guard is not None and scales_loss(self.model.optimizer) and not guard.is_spike()
        if not bad or scale:
            self._guarded(self._update, slices, dense, weight)
        if not bad:
            self._guarded(self._update.average, self._changed, weight)
        synchronize_seeds(self._changed, self.model, self.planned.placement.copies)
        return self._logs("train", microbatches, outcome, restored=bad)

    def _is_bad(self, guard: UpdateGuard, slices: dict[int, list[Any]], dense: set[int]) -> bool:
        """Return whether all stages and replicas skip the update, and restore the state then."""
        placement = self.planned.placement
        total, count = self._loss_of_step.sums() if self._loss_of_step else (0.0, 0.0)
        finite = not guard.finite or self._update.is_finite(slices, dense)
        mine = np.array([total, count, not finite], np.float64)
        for world in (placement.copies, placement.model):
            mine = world.oob_allreduce(mine, "sum", "loss and gradients of the step")
        loss = tf.math.divide_no_nan(*tf.unstack(tf.constant(mine[:2])))
        bad = guard.is_bad(loss, [], self.model.optimizer) | (mine[2] > 0)
        guard.note(bad, loss)
        metrics = {id(v) for v in self.model.metrics_variables}
        for variable in self._changed if bad else ():
            if id(variable) in metrics or tf.as_dtype(variable.dtype).is_floating:
                variable.assign(self._before[id(variable)])
        return bool(bad)

    def test(self, batch: LocalBatchLike) -> Logs:
        microbatches = self._cut([batch])
        return self._logs("test", microbatches, self._run("test", microbatches))

    def predict(self, batch: LocalBatchLike) -> Any:
        self._build(spec_of(batch.batch), metrics=False)
        microbatches = self._cut([batch])
        outcome = self._run("predict", microbatches)
        if not self.counts_metrics:
            return None
        outputs = [
            np.concatenate([x.numpy() for x in parts])
            for parts in zip(*outcome.results, strict=True)
        ]
        structure = self._compiled.stages("predict", microbatches[-1])[-1].logs
        kept = slice(None) if batch.examples else slice(0)  # an output may have more rows
        return keras.tree.pack_sequence_as(structure, [x[kept] for x in outputs])

    def _cut(self, batches: Sequence[LocalBatchLike]) -> list[Microbatch]:
        return cut_batches(batches, self.config.microbatches, self.planned.as_cut)

    # -- one run of a schedule

    def _run(self, mode: Mode, microbatches: list[Microbatch], scale: float = 1.0) -> StepOutcome:
        with self._compiled.with_global_seed():
            return self._run_seeded(mode, microbatches, scale)

    def _run_seeded(self, mode: Mode, microbatches: list[Microbatch], scale: float) -> StepOutcome:
        compiled = [self._compiled.stages(mode, microbatch) for microbatch in microbatches]
        state = self._compiled.state(mode)
        values = Values(
            trainable={id(v): tf.convert_to_tensor(v.value) for v in self._held},
            state={id(v): tf.convert_to_tensor(v.value) for v in state},
        )
        self._before = before = dict(values.state)
        if mode == "train" and self.options.guard is not None and self.counts_metrics:
            self._loss_of_step = LossOfStep(self.model)
        outcome = self._runner.run(
            self._schedule(mode, len(microbatches)),
            self.planned.partition,
            microbatches,
            compiled,
            values,
            scale,
            self._count(mode, microbatches),
            self._global_loss if self.counts_metrics and mode != "predict" else None,
        )
        # The variables that may change are the same in all replicas, also in one without data.
        changing = {id(v) for stages in compiled for stage in stages for v in stage.changes}
        changing |= set(self._global_loss.changes) if self._global_loss is not None else set()
        self._changed = [v for v in state if id(v) in changing]
        for variable in self._changed:
            if values.state[id(variable)] is not before[id(variable)]:
                variable.assign(values.state[id(variable)])
        return outcome

    def _count(self, mode: Mode, microbatches: list[Microbatch]) -> Any:
        """Denominators of losses over all microbatches and replicas; on the last stage."""
        if not self.counts_metrics or mode == "predict" or self._global_loss is not None:
            return None
        counts = [
            self._compiled.denominators(mode, m)(m.data) * float(m.weight > 0) for m in microbatches
        ]
        return total_denominators(counts, self._over_replicas)

    def _over_replicas(self, denominators: tf.Tensor) -> tf.Tensor:
        copies = self.planned.placement.copies
        if copies.size == 1:
            return denominators
        what = "denominators of losses"
        return tf.constant(copies.oob_allreduce(denominators.numpy(), "sum", what), tf.float64)

    def _logs(
        self,
        mode: Mode,
        microbatches: list[Microbatch],
        outcome: StepOutcome,
        restored: bool = False,
    ) -> Logs:
        """Logs of the last stage, on every partition.

        Args:
            restored: metrics were restored, so they are read again.
        """
        logs = None
        if self.counts_metrics:
            structure = self._compiled.stages(mode, microbatches[-1])[-1].logs
            values = [x.numpy() for x in outcome.results[-1]]
            logs = keras.tree.pack_sequence_as(structure, values)
            if (restored or self._global_loss is not None) and isinstance(logs, dict):
                again = self.model.get_metrics_result()
                known = flatten_paths(logs)
                kept = {p: np.asarray(again[str(p[-1])]) for p in known if p[-1] in again}
                logs = unflatten_paths(logs, {**known, **kept})
        world = self.planned.placement.model
        return world.broadcast(logs, world.size - 1, "logs of the last stage")

    def _loss_scale(self) -> float:
        optimizer = self.model.optimizer
        return float(keras.ops.convert_to_numpy(optimizer.scale_loss(tf.constant(1.0))))

    def _guarded(self, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except tf.errors.OpError as error:
            for collectives in self._collectives:
                cause = collectives.failure(error) if collectives is not None else None
                if cause is not None:
                    raise cause from error
            raise

    def _schedule(self, mode: Mode, microbatches: int) -> Schedule:
        key = (mode == "train", microbatches)
        if key not in self._schedules:
            config = self.config
            name = config.schedule if mode == "train" else "forward_only"
            active = config.active_microbatches if mode == "train" else None
            self._schedules[key] = make_schedule(
                name, config.partitions, microbatches, config.chunks, active
            )
        return self._schedules[key]


def _widened(one: tuple[int | None, ...], two: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The dimensions that both shapes have; None where they differ."""
    return tuple(a if a == b else None for a, b in zip(one, two, strict=True))
