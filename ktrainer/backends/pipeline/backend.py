"""Pipeline parallelism: each process holds some stages, through which microbatches flow.

With more processes than partitions there are several copies of the model, each of which trains
on its part of every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from ktrainer.backends.backend import Backend
from ktrainer.backends.pipeline.check_supported import (
    refuse_callbacks,
    refuse_model,
)
from ktrainer.backends.pipeline.own_step_program import OwnStepProgram
from ktrainer.backends.pipeline.placement.deferred_variables import build_deferred
from ktrainer.backends.pipeline.placement.moving_averages import swap_held_averages
from ktrainer.backends.pipeline.planned_model import PLANNED, PlannedModel
from ktrainer.backends.pipeline.program import PipelineProgram
from ktrainer.backends.pipeline.runtime.transport import WaitTime
from ktrainer.config.pipeline_checks import effective_pipeline
from ktrainer.distributed.rank_layout import Layout
from ktrainer.distributed.world import SingleWorld
from ktrainer.errors import ConfigError, ModelError
from ktrainer.runtime.devices import accelerator
from ktrainer.runtime.monkeypatching import replaced
from ktrainer.steps.move_out_of_strategy import unwrap_variables
from ktrainer.steps.step_helpers import has_own_steps

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config, PipelineConfig
    from ktrainer.distributed import World
    from ktrainer.distributed.collectives import GradientCollectives
    from ktrainer.distributed.mpi_communicator import MpiComm
    from ktrainer.distributed.mpi_world import MpiWorld
    from ktrainer.plan.run_plan import Plan
    from ktrainer.steps import Program, StepOptions


class Pipeline(Backend):
    """Runs a model in stages, one or more in each process."""

    name = "pipeline"

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        super().__init__(config, plan, world)
        self._keys = effective_pipeline(config, cast("PipelineConfig", config.backend))
        partitions = self._keys.partitions
        self.layout = Layout(partitions, world.size // partitions, self._keys.placement)
        replica = self.layout.replica_of(world.rank)
        world.assign_replica(replica, self.layout.replicas)
        self.groups = self._open_groups(world)
        self._collectives: tuple[GradientCollectives | None, GradientCollectives | None] = (
            self._open_planes()
        )
        self._waits = WaitTime()

    def build_model(self, build: Callable[[], Any]) -> Any:
        return build_deferred(build)

    @property
    def input_device(self) -> str | None:
        # The first partition needs the inputs, the last one the targets too, and others neither.
        partition = self.layout.partition_of(self.world.rank)
        return accelerator() if partition in (0, self.layout.partitions - 1) else None

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        """The steps of `model`, which is cut when its data is known.

        Raises:
            ModelError: see `refuse_model`; or it was cut by another Trainer.
        """
        refuse_model(model, self.layout.replicas)
        planned = vars(model).get(PLANNED)
        if planned is None:
            unwrap_variables(model)  # of the user's own strategy
            batch = max(self.plan.rank_batches)
            planned = PlannedModel(
                model,
                self._keys,
                batch,
                self.config.trainer.accumulate,
                self.layout,
                self.world,
                self.groups,
                verifies=self.config.health.verify != "off",
            )
            # On the model, past Keras' tracking, for as long as the model lives.
            vars(model)[PLANNED] = planned
        elif planned.groups is not self.groups:
            raise ModelError(
                f"model {model.name!r} was cut into stages by another Trainer: continue with that "
                "Trainer, or save the model with trainer.save and load it again"
            )
        planned.check_unchanged()
        if has_own_steps(model):
            return OwnStepProgram(planned, options, self._keys, *self._collectives, self._waits)
        global_loss = self.config.trainer.loss_scope == "global"
        return PipelineProgram(
            planned, options, self._keys, *self._collectives, self._waits, global_loss
        )

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Refuse those that need a whole model; see `refuse_callbacks`."""
        refuse_callbacks(callbacks)

    def watching(self) -> AbstractContextManager[None]:
        """Context in which `SwapEMAWeights` swaps the weights that this process holds."""
        return replaced(*swap_held_averages())

    @property
    def communication_seconds(self) -> float | None:
        collectives_of = [
            collectives.seconds for collectives in self._collectives if collectives is not None
        ]
        return (
            None
            if None in collectives_of
            else self._waits.seconds + sum(cast("list[float]", collectives_of))
        )

    def close(self) -> None:
        for collectives in self._collectives:
            if collectives is not None:
                collectives.close()
        for group in self.groups:
            group.close()

    def _open_groups(self, world: World) -> tuple[World, World]:
        """Groups of the processes of this replica, and of those with the same partition."""
        if world.size == 1:
            return SingleWorld(), SingleWorld()
        if world.name != "mpi":
            raise ConfigError(
                f"the processes were started by {world.name}, but stages talk through MPI; start "
                "them with `ktrainer run`, mpirun or srun.",
                path="backend",
                value="pipeline",
            )
        mpi = cast("MpiWorld", world)
        replica = self.layout.replica_of(world.rank)
        partition = self.layout.partition_of(world.rank)
        return (
            mpi.group(self.layout.model_ranks(replica), f"the stages of replica {replica}"),
            mpi.group(self.layout.copy_ranks(partition), f"the copies of partition {partition}"),
        )

    def _open_planes(self) -> tuple[GradientCollectives | None, GradientCollectives | None]:
        """Sums over stages, always through MPI; and over replicas, by the chosen engine."""
        stages = replicas = None
        if self.layout.partitions > 1:
            from ktrainer.distributed.mpi_gradients import MpiGradients

            stages = MpiGradients(cast("MpiComm", self.groups[0]))
        if self.layout.replicas > 1:
            replicas = self._open_replicas()
        return stages, replicas

    def _open_replicas(self) -> GradientCollectives:
        compression = self._keys.compression
        if self.plan.engine == "horovod":
            from ktrainer.distributed.horovod_gradients import HorovodGradients

            layout = self.layout
            return HorovodGradients(
                self.world,
                compression,
                ranks=layout.copy_ranks(layout.partition_of(self.world.rank)),
                all_groups=[layout.copy_ranks(p) for p in range(layout.partitions)],
                hierarchical=bool(self._keys.hierarchical),
            )
        from ktrainer.distributed.mpi_gradients import MpiGradients

        return MpiGradients(
            cast("MpiComm", self.groups[1]),
            compression=compression,
            hierarchical=self._keys.hierarchical is not False,
        )
