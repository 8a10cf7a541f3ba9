"""Model parallelism: each process holds some stages of the model, and microbatches flow through.

With more processes than partitions there are several copies of the model, each of which trains
on its share of every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from ktrainer.backends.base import Backend
from ktrainer.backends.pipeline.deferred import build_deferred
from ktrainer.backends.pipeline.planned import PlannedModel
from ktrainer.backends.pipeline.post import Waits
from ktrainer.backends.pipeline.program import PipelineProgram
from ktrainer.backends.pipeline.refusals import refuse_callbacks, refuse_model
from ktrainer.config.pipeline import effective_pipeline
from ktrainer.errors import ConfigError, ModelError
from ktrainer.steps.strategy_variables import unwrap_variables
from ktrainer.world.base import SingleWorld
from ktrainer.world.layout import Layout

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config, PipelineConfig
    from ktrainer.plan import Plan
    from ktrainer.steps import StepOptions
    from ktrainer.world import World
    from ktrainer.world.mpi import MpiWorld
    from ktrainer.world.mpi_comm import MpiComm
    from ktrainer.world.plane import GradientPlane


PLANNED = "_ktrainer_planned"


class Pipeline(Backend):
    """Runs a model in stages, one or more in each process."""

    name = "pipeline"

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        super().__init__(config, plan, world)
        self._keys = effective_pipeline(config, cast("PipelineConfig", config.backend))
        partitions = self._keys.partitions
        self.layout = Layout(partitions, world.size // partitions, self._keys.placement)
        replica = self.layout.replica_of(world.rank)
        world.share_data(replica, self.layout.replicas)
        self.groups = self._open_groups(world)
        self._planes: tuple[GradientPlane | None, GradientPlane | None] = self._open_planes()
        self._waits = Waits()

    def build_model(self, build: Callable[[], Any]) -> Any:
        return build_deferred(build)

    def prepare(self, model: keras.Model, options: StepOptions) -> PipelineProgram:
        """The steps of `model`, which is cut when its data is known.

        Raises:
            ModelError: see `refuse_model`; or it was cut by another Trainer.
        """
        refuse_model(model, self.layout.replicas)
        planned = vars(model).get(PLANNED)
        if planned is None:
            unwrap_variables(model)  # of a strategy of the user's own
            batch = max(self.plan.rank_batches)
            planned = PlannedModel(
                model,
                self._keys,
                batch,
                self.config.trainer.accumulate,
                self.layout,
                self.world,
                self.groups,
            )
            # With the model, past Keras' tracking: it lives as long as that does.
            vars(model)[PLANNED] = planned
        elif planned.groups is not self.groups:
            raise ModelError(
                f"model {model.name!r} was cut into stages by another Trainer; train it on with "
                "that one, or save it and load it anew"
            )
        planned.check_unchanged()
        global_loss = self.config.trainer.loss_scope == "global"
        return PipelineProgram(
            planned, options, self._keys, *self._planes, self._waits, global_loss
        )

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Refuse those that need a whole model; see `refuse_callbacks`."""
        refuse_callbacks(callbacks)

    @property
    def communication_seconds(self) -> float | None:
        planes = [plane.seconds for plane in self._planes if plane is not None]
        return None if None in planes else self._waits.seconds + sum(cast("list[float]", planes))

    def close(self) -> None:
        for plane in self._planes:
            if plane is not None:
                plane.close()
        for group in self.groups:
            group.close()

    def _open_groups(self, world: World) -> tuple[World, World]:
        """The processes of this replica, and those with the same partition."""
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

    def _open_planes(self) -> tuple[GradientPlane | None, GradientPlane | None]:
        """Sums over stages, always through MPI; and over replicas, by the chosen engine."""
        stages = replicas = None
        if self.layout.partitions > 1:
            from ktrainer.world.plane_mpi import MpiPlane

            stages = MpiPlane(cast("MpiComm", self.groups[0]))
        if self.layout.replicas > 1:
            replicas = self._open_replicas()
        return stages, replicas

    def _open_replicas(self) -> GradientPlane:
        compression = self._keys.compression
        if self.plan.engine == "horovod":
            from ktrainer.world.plane_horovod import HorovodPlane

            layout = self.layout
            return HorovodPlane(
                self.world,
                compression,
                ranks=layout.copy_ranks(layout.partition_of(self.world.rank)),
                all_groups=[layout.copy_ranks(p) for p in range(layout.partitions)],
            )
        from ktrainer.world.plane_mpi import MpiPlane

        return MpiPlane(cast("MpiComm", self.groups[1]), compression=compression)
