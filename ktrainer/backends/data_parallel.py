"""Data parallelism: one process per device, each with the whole model and rows of every batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from keras.callbacks import BackupAndRestore

from ktrainer.backends.backend import Backend
from ktrainer.backends.rank_loop import RankLoop
from ktrainer.backends.user_loop import UserLoop
from ktrainer.errors import ConfigError
from ktrainer.steps import CompiledProgram, Program, StepOptions
from ktrainer.steps.move_out_of_strategy import unwrap_variables

if TYPE_CHECKING:
    import keras

    from ktrainer.config import Config, DataParallelConfig
    from ktrainer.distributed import World
    from ktrainer.distributed.collectives import GradientCollectives
    from ktrainer.distributed.mpi_communicator import MpiComm
    from ktrainer.plan.run_plan import Plan


class DataParallel(Backend):
    """Sums gradients over ranks; with one rank, the same as `Local`."""

    name = "data_parallel"

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        super().__init__(config, plan, world)
        self._collectives: GradientCollectives | None = (
            self._open_collectives() if world.size > 1 or world.heals else None
        )

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        unwrap_variables(model)  # of a strategy of the user's own
        # Not the rank, which changes when others are lost: the step is not compiled again then.
        return CompiledProgram(model, options, self._collectives, self.world.stable_rank)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        if not any(isinstance(c, BackupAndRestore) for c in callbacks):
            return
        if self._local_layers:
            raise ConfigError(
                "keras.callbacks.BackupAndRestore keeps the weights of rank 0 alone, and each rank "
                "has its own local layers: use checkpoint.every instead",
                path="backend.local_layers",
                value=self._local_layers,
            )
        if self._low_rank is not None:
            raise ConfigError(
                "keras.callbacks.BackupAndRestore does not keep what PowerSGD has yet to send of "
                "each rank's gradients: use checkpoint.every instead",
                path="backend.compression",
                value="powersgd",
            )

    def open_loop(self) -> UserLoop:
        if self._local_layers:
            raise ConfigError(
                "local layers are for trainer.fit, evaluate and predict: in a loop of your own, "
                "whose step may use any variables, it cannot be told which layers these are. Use "
                "hvd.PartialDistributedGradientTape or hvd.PartialDistributedOptimizer of "
                "ktrainer.dataparallel there",
                path="backend.local_layers",
                value=self._local_layers,
            )
        if self._low_rank is not None:
            raise ConfigError(
                "PowerSGD is for trainer.fit: in a loop of your own, which may reduce anything, it "
                "cannot be told what is left to send of which variable. Set "
                "backend.compression=bf16, fp16 or none there",
                path="backend.compression",
                value="powersgd",
            )
        if self._collectives is None:
            return UserLoop(self.world)
        return RankLoop(self.world, self._collectives, self.config.data)

    @property
    def _local_layers(self) -> list[str]:
        return cast("DataParallelConfig", self.config.backend).local_layers

    @property
    def _low_rank(self) -> int | None:
        return cast("DataParallelConfig", self.config.backend).low_rank

    @property
    def communication_seconds(self) -> float | None:
        return self._collectives.seconds if self._collectives is not None else 0.0

    def close(self) -> None:
        if self._collectives is not None:
            self._collectives.close()

    def _open_collectives(self) -> GradientCollectives:
        backend = cast("DataParallelConfig", self.config.backend)
        if self.plan.engine == "horovod":
            from ktrainer.distributed.horovod_gradients import HorovodGradients

            return HorovodGradients(
                self.world,
                backend.wire,
                backend.sparse_as_dense,
                hierarchical=bool(backend.hierarchical),
            )
        if self.world.name != "mpi":
            raise ConfigError(
                f"the processes were started by {self.world.name}, not by MPI; start them with "
                "`ktrainer run`, mpirun or srun, or set backend.engine=horovod",
                path="backend.engine",
                value="mpi",
            )
        from ktrainer.distributed.mpi_gradients import MpiGradients

        return MpiGradients(
            cast("MpiComm", self.world),
            backend.bucket_mb,
            backend.wire,
            backend.sparse_as_dense,
            backend.hierarchical is not False,
        )
