"""The backend `tf_distribute`: one of TensorFlow's strategies under our loop."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import tensorflow as tf

from ktrainer.backends.backend import Backend
from ktrainer.backends.tf_distribute.clusters import cluster_of, restore_environment
from ktrainer.backends.tf_distribute.lost_process import exiting_after, naming_lost_workers
from ktrainer.backends.tf_distribute.move_into_strategy import scope_of
from ktrainer.backends.tf_distribute.program import ReplicatedProgram
from ktrainer.backends.tf_distribute.replicas.replica_collectives import ReplicaCollectives
from ktrainer.backends.tf_distribute.replicas.replica_loop import ReplicaLoop, StrategyLoop
from ktrainer.backends.tf_distribute.replicas.replica_step import Replicas
from ktrainer.backends.tf_distribute.server_interface import kept_on_interface
from ktrainer.backends.tf_distribute.strategies import (
    communication_options,
    make_devices,
    open_strategy,
)
from ktrainer.backends.user_loop import UserLoop
from ktrainer.config.cluster_environment import ClusterSpec, tf_config
from ktrainer.errors import PeerLost
from ktrainer.plan.strategy_plan import StrategyPlan
from ktrainer.runtime.devices import accelerator, claim_device
from ktrainer.steps import CompiledProgram, StepOptions
from ktrainer.steps.move_out_of_strategy import unwrap_variables
from ktrainer.steps.program_interface import Program

if TYPE_CHECKING:
    import keras

    from ktrainer.backends.tf_distribute.parameter_server.worker_pool import WorkerPool
    from ktrainer.config import Config, TfDistributeConfig
    from ktrainer.distributed import World
    from ktrainer.plan.run_plan import Plan


_EXTRA_SECONDS = 30.0  # for TensorFlow itself


class TfDistribute(Backend):
    """Runs the model's steps on the replicas of a strategy."""

    name = "tf_distribute"

    def __init__(self, config: Config, plan: Plan, world: World) -> None:
        self.settings = cast("TfDistributeConfig", config.backend)
        assert plan.strategy is not None
        self.layout: StrategyPlan = plan.strategy
        super().__init__(config, plan, world)
        self.timeout = self.settings.timeout or config.world.deadline
        self.cluster = self._find_cluster()
        with self._starting_in_time(), self._on_one_interface():
            self.strategy = open_strategy(self.settings, self.layout, self.cluster, self.timeout)
        self._moved: WeakSet[keras.Model] = WeakSet()

    def claim_devices(self) -> None:
        expects_gpu = self.plan.device == "gpu"
        claim_device(self.world, self.plan.threads, len(self.layout.devices), expects_gpu)
        make_devices(self.layout)

    @property
    def input_device(self) -> str | None:
        # Several devices each get a part of the batch, which is cut on the CPU; and workers of a
        # coordinator get batches from its host.
        away = self.layout.strategy in ("parameter_server", "central_storage", "tpu")
        one_gpu = len(self.layout.devices) == 1 and self.layout.devices[0].startswith("GPU")
        return accelerator() if one_gpu and not away else None

    def prepare(self, model: keras.Model, options: StepOptions) -> Program:
        if self.layout.strategy == "default":
            unwrap_variables(model)  # of a strategy of the user's own
            return CompiledProgram(model, options)
        self._moved.add(model)
        if self.layout.strategy == "parameter_server":
            return self._coordinated(model, options)
        return ReplicatedProgram(
            model, options, self._replicas(model, options), self.guard, self._agree
        )

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext() if self.workers is None else self.workers.watching()

    def scope(self) -> AbstractContextManager[Any]:
        """Context in which variables are made as the strategy requires."""
        return scope_of(self.strategy)

    def open_loop(self) -> UserLoop:
        words = (self.world, self.strategy, self.guard, self.settings.auto_shard)
        if self.workers is not None:
            from ktrainer.backends.tf_distribute.parameter_server.worker_pool import WorkerLoop

            return WorkerLoop(*words, workers=self.workers)
        collectives = self._collectives()
        if collectives is None:
            return StrategyLoop(*words)
        return ReplicaLoop(*words, collectives=collectives)

    @property
    def communication_seconds(self) -> float | None:
        return None

    def close(self) -> None:
        """Leave the models with ordinary variables."""
        for model in list(self._moved):
            # A lost server has lost its weights; that has been reported already.
            if self.workers is not None and self.workers.lost_weights:
                continue
            with suppress(tf.errors.UnavailableError, PeerLost), self.watching():
                unwrap_variables(model, self.strategy)
        self._moved.clear()
        restore_environment()

    def _find_cluster(self) -> ClusterSpec | None:
        """The processes of a strategy that has several; does not return in a worker or server."""
        if self.layout.strategy == "multi_worker_mirrored":
            return cluster_of(self.world)
        if self.layout.strategy != "parameter_server":
            return None
        from ktrainer.backends.tf_distribute.parameter_server.cluster_task import serve
        from ktrainer.backends.tf_distribute.parameter_server.liveness import wait_for_cluster

        cluster = tf_config()
        assert cluster is not None  # or the plan would have been refused
        if cluster.job != "chief":
            serve(cluster, self.settings.start_timeout)
        self._liveness = wait_for_cluster(cluster, self.settings.start_timeout)
        return cluster

    def guard(self) -> AbstractContextManager[None]:
        """Context in which errors caused by another process name it."""
        return naming_lost_workers(self.world, self.cluster, self.timeout)

    def _starting_in_time(self) -> AbstractContextManager[None]:
        """Exit if TensorFlow does not connect the processes: one may fail after the cluster met."""
        if self.cluster is None:
            return nullcontext()
        seconds = self.settings.start_timeout + _EXTRA_SECONDS
        return exiting_after(
            seconds,
            lambda: (
                f"TensorFlow did not connect the processes of the cluster in {seconds:g} s: one of "
                "them has ended. See the output of the others."
            ),
        )

    def _on_one_interface(self) -> AbstractContextManager[None]:
        return nullcontext() if self.cluster is None else kept_on_interface(self.cluster)

    def _agree(self, flag: bool) -> bool:
        return self.world.any(flag, "steps in one call")

    def _coordinated(self, model: keras.Model, options: StepOptions) -> Program:
        from ktrainer.backends.tf_distribute.parameter_server.coordinator import (
            CoordinatedProgram,
            RemoteReplicas,
        )

        assert self.workers is not None
        replicas = RemoteReplicas(self.strategy, model)
        each_step = self.settings.join == "step"
        return CoordinatedProgram(model, options, replicas, self.workers, each_step)

    @cached_property
    def workers(self) -> WorkerPool | None:
        """The workers that run steps, with parameter servers; else None."""
        if self.layout.strategy != "parameter_server":
            return None
        from ktrainer.backends.tf_distribute.parameter_server.worker_pool import WorkerPool

        return WorkerPool(self.strategy, self._liveness, self.world, self.timeout)

    def _replicas(self, model: keras.Model, options: StepOptions) -> Replicas:
        total = self.strategy.num_replicas_in_sync
        here = total // self.layout.processes  # of a TPU the plan does not know how many
        first = self.world.rank * here
        return Replicas(self.strategy, model, self._collectives(), here, first, options.loss_scope)

    def _collectives(self) -> ReplicaCollectives | None:
        if self.strategy.num_replicas_in_sync == 1:
            return None
        return ReplicaCollectives(self.strategy, communication_options(self.settings, self.timeout))
