"""One process a device, each with the whole model and a share of every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ktrainer.backends.base import Backend
from ktrainer.errors import ConfigError
from ktrainer.steps import Program, StepOptions
from ktrainer.steps.strategy_variables import unwrap_variables

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config, DataParallelConfig
    from ktrainer.plan import Plan
    from ktrainer.world import World
    from ktrainer.world.mpi_comm import MpiComm
    from ktrainer.world.plane import GradientPlane


class DataParallel(Backend):
    """Sums gradients over ranks; with one rank, the same as `Local`."""

    name = "data_parallel"

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        super().__init__(config, plan, world)
        self._plane: GradientPlane | None = (
            self._open_plane() if world.size > 1 or world.heals else None
        )

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        unwrap_variables(model)  # of a strategy of the user's own
        # Not the rank, which changes when others die; the step is not compiled anew for that.
        return Program(model, options, self._plane, self.world.slot)

    @property
    def communication_seconds(self) -> float | None:
        return self._plane.seconds if self._plane is not None else 0.0

    def close(self) -> None:
        if self._plane is not None:
            self._plane.close()

    def _open_plane(self) -> GradientPlane:
        backend = cast("DataParallelConfig", self.config.backend)
        if self.plan.engine == "horovod":
            from ktrainer.world.plane_horovod import HorovodPlane

            return HorovodPlane(self.world, backend.compression, backend.sparse_as_dense)
        if self.world.name != "mpi":
            raise ConfigError(
                f"the processes were started by {self.world.name}, not by MPI; start them with "
                "`ktrainer run`, mpirun or srun, or set backend.engine=horovod",
                path="backend.engine",
                value="mpi",
            )
        from ktrainer.world.plane_mpi import MpiPlane

        return MpiPlane(
            cast("MpiComm", self.world),
            backend.bucket_mb,
            backend.compression,
            backend.sparse_as_dense,
        )
