"""The stages of a pipeline, run and timed in one process."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from ktrainer.backends.pipeline.backend import Pipeline
from ktrainer.backends.pipeline.check_supported import refuse_model
from ktrainer.backends.pipeline.program import PipelineProgram
from ktrainer.backends.pipeline.runtime.transport import WaitTime
from ktrainer.backends.pipeline.schedules.actions import Action
from ktrainer.config import PipelineConfig
from ktrainer.data import Feed
from ktrainer.distributed.world import SingleWorld
from ktrainer.errors import ConfigError, ModelError
from ktrainer.plan_report.pipeline_scaling_model import MeasuredStages
from ktrainer.plan_report.scaling_measurement import Train
from ktrainer.plan_report.scaling_model import MeasuredStep
from ktrainer.steps.step_helpers import has_own_steps
from ktrainer.training.fit_settings import step_options

if TYPE_CHECKING:
    from ktrainer.distributed.collectives import GradientCollectives
    from ktrainer.training.context import RunContext


class TimedStages:
    """All stages of a pipeline in one process, which times their actions.

    Args:
        context: of a call of `fit`.
        model: that it was given.
        collectives: sums over replicas.

    Raises:
        ConfigError, ModelError: it cannot run so.
    """

    def __init__(self, context: RunContext, model: Any, collectives: GradientCollectives) -> None:
        keys = cast(PipelineConfig, context.config.backend)
        if context.config.trainer.loss_scope == "global":
            raise ConfigError(
                "a pipeline whose loss is of the whole batch cannot be timed stage by stage: plan "
                "without --world, or with trainer.loss_scope=local.",
                path="trainer.loss_scope",
                value="global",
            )
        if has_own_steps(model):
            raise ModelError(
                f"model {model.name!r} has a train_step of its own, which a pipeline runs as a "
                "whole: its stages cannot be timed one by one. Plan without --world."
            )
        refuse_model(model, 1)
        stages = keys.partitions * keys.chunks
        self._keys = replace(keys, partitions=1, chunks=stages, schedule="interleaved")
        self._accumulate = context.config.trainer.accumulate
        config = context.config.with_changes(backend=self._keys)
        backend = Pipeline(config, context.plan, SingleWorld())
        planned = backend.prepare(model, step_options(config)).planned  # type: ignore[attr-defined]
        self.program = PipelineProgram(
            planned, step_options(config), self._keys, None, collectives, WaitTime()
        )
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def train(self, feed: Feed) -> Train:
        """Build the stages for a feed, and forget the times so far; makes an update."""
        self.program.build(feed.spec)
        self.program._runner.on_action = self._note
        self._seconds.clear()
        return self.program.train

    def _note(self, action: Action, seconds: float) -> None:
        self._seconds[action.kind, action.stage].append(seconds)

    def stages(self, step: MeasuredStep) -> MeasuredStages:
        """The times of all actions since `train`."""
        assignment = self.program.planned.plan.assignment
        count = len(assignment.stages)
        total = sum(stage.parameters for stage in assignment.stages) or 1
        microbatches = self._keys.microbatches * self._accumulate
        planned, rows = self.program.planned.plan.batch, step.batch / microbatches
        return MeasuredStages(
            step,
            self._of_stages("F", count),
            self._of_stages("B", count),
            tuple(stage.parameters / total for stage in assignment.stages),
            tuple(s.crossing_bytes * rows / planned for s in assignment.stages[:-1]),
        )

    def _of_stages(self, kind: str, count: int) -> tuple[float, ...]:
        return tuple(median(self._seconds[kind, stage]) for stage in range(count))
