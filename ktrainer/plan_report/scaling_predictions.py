"""Steps of other numbers of processes, predicted from steps that all ranks measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ktrainer.backends.pipeline.schedules.make_schedule import make_schedule
from ktrainer.config import DataParallelConfig, PipelineConfig
from ktrainer.config.pipeline_checks import effective_pipeline
from ktrainer.distributed.rank_layout import Layout
from ktrainer.plan.communication_cost import Group
from ktrainer.plan_report.pipeline_scaling_model import (
    MeasuredStages,
    predict_pipeline,
    sharing_slowdown,
)
from ktrainer.plan_report.scaling_measurement import RecordingGradients, alone, measure_step
from ktrainer.plan_report.scaling_model import (
    Communication,
    Hosts,
    MeasuredStep,
    PredictedStep,
    predict,
)
from ktrainer.plan_report.scaling_stages import TimedStages
from ktrainer.runtime.hardware import available_cpus
from ktrainer.steps import CompiledProgram
from ktrainer.steps.local_layers import set_local_layers
from ktrainer.steps.powersgd import set_powersgd
from ktrainer.training.context import RunContext
from ktrainer.training.fit_settings import step_options


class StepPredictions:
    """Measures steps of one process, and predicts those of several; on all ranks alike.

    Args:
        context: of a call of `fit`.
        model, data: that it was given.
        hosts: planned for.
        communication: between their ranks.

    Raises:
        ConfigError, ModelError: it cannot run so.
    """

    def __init__(
        self,
        context: RunContext,
        model: Any,
        data: Any,
        hosts: Hosts,
        communication: Communication,
    ) -> None:
        self._context, self._model, self._data = context, model, data
        self._hosts, self._communication = hosts, communication
        self._here = _measuring_hosts(context, hosts)
        backend = context.config.backend
        self._recorder = RecordingGradients(
            alone(context.world),
            compression=backend.wire
            if isinstance(backend, DataParallelConfig)
            else getattr(backend, "compression", "none"),
            sparse_as_dense=getattr(backend, "sparse_as_dense", False),
        )
        self._programs: dict[Any, dict[bool, CompiledProgram]] = {}  # by sizes of buckets
        self._stages: TimedStages | None = None
        if isinstance(backend, PipelineConfig):
            self._stages = TimedStages(context, model, self._recorder)

    def steps(self, worlds: Sequence[int]) -> list[PredictedStep]:
        """The steps of so many processes, on rank 0; all ranks measure them."""
        predict_one = self._data_parallel if self._stages is None else self._pipeline
        steps = [predict_one(processes) for processes in worlds]
        return [step for step in steps if step is not None]

    def timed_at_once(self, processes: int) -> int:
        """How many processes of a host are timed at the same time, for so many in all."""
        return self._hosts.measured_at_once(processes, self._here)

    def _data_parallel(self, processes: int) -> PredictedStep | None:
        context, hosts, recorder = self._context, self._hosts, self._recorder
        backend, several = context.config.backend, processes > 1
        assert isinstance(backend, DataParallelConfig)
        group = Group.of(range(processes), hosts.per_host)
        sizes = recorder.set_buckets(backend, group, self._communication.network.between)
        if sizes not in self._programs:
            self._programs[sizes] = self._compiled()
        program, reduces = self._programs[sizes][several], recorder if several else None

        def train(feed: Any) -> Any:
            program.build(feed.spec)
            return program.train

        timed = self.timed_at_once(processes)
        step = measure_step(context, self._data, train, reduces, replicas=processes, at_once=timed)
        step = replace(step, crowding=self._here.crowding(timed))
        if not context.world.is_root:
            return None
        return predict(step, processes, hosts, self._communication)

    def _compiled(self) -> dict[bool, CompiledProgram]:
        """The steps of one process, and of one of several."""
        config = self._context.config
        set_local_layers(self._model, getattr(config.backend, "local_layers", ()))
        set_powersgd(self._model, getattr(config.backend, "low_rank", None))
        options = step_options(config)
        return {
            several: CompiledProgram(self._model, options, self._recorder if several else None)
            for several in (False, True)
        }

    def _pipeline(self, processes: int) -> PredictedStep | None:
        config = self._context.config
        assert isinstance(config.backend, PipelineConfig)
        keys = effective_pipeline(config, config.backend)
        replicas = processes // keys.partitions
        measured = self._measured_stages(processes, replicas)
        if measured is None:
            return None
        schedule = make_schedule(
            keys.schedule,
            keys.partitions,
            max(1, min(keys.microbatches, int(measured.step.batch))) * config.trainer.accumulate,
            keys.chunks,
            keys.active_microbatches,
        )
        layout = Layout(keys.partitions, replicas, keys.placement)
        return predict_pipeline(measured, layout, schedule, self._hosts, self._communication)

    def _measured_stages(self, processes: int, replicas: int) -> MeasuredStages | None:
        """The stages on cores of their own, and how much sharing slows steps down; on rank 0."""
        stages, at_once = self._stages, self.timed_at_once(processes)
        assert stages is not None
        alone = min(at_once, self._here.places)

        def measured(at_once: int) -> MeasuredStep:
            return measure_step(
                self._context,
                self._data,
                stages.train,
                self._recorder,
                replicas=replicas,
                at_once=at_once,
            )

        step = measured(alone)
        found = stages.stages(step) if self._context.world.is_root else None
        sharing = measured(at_once) if at_once > alone else step
        if found is None:
            return None
        slowdown = sharing_slowdown(step.seconds, sharing.seconds, at_once, self._here.places)
        return replace(found, sharing_slowdown=slowdown)


def _measuring_hosts(context: RunContext, hosts: Hosts) -> Hosts:
    """The hosts that measure, on all ranks alike: the fewest cores, the most processes."""
    every = context.world.allgather((context.world.local_size, len(available_cpus())))
    most, cores = max(size for size, _ in every), min(count for _, count in every)
    return replace(hosts, per_host=most, cores=cores or hosts.cores)
