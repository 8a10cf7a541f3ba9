"""A training loop of the user's own with parameter servers: workers run its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ktrainer.backends.tf_distribute.parameter_server.sharded_variables import sharded_variables
from ktrainer.backends.tf_distribute.parameter_server.worker_pool import WorkerPool
from ktrainer.backends.tf_distribute.replicas.replica_loop import StrategyLoop
from ktrainer.backends.tf_distribute.replicas.replica_scopes import adding_at_once
from ktrainer.backends.user_loop import ReduceOp
from ktrainer.data.distributed_dataset import require_dataset
from ktrainer.errors import ConfigError


class WorkerLoop(StrategyLoop):
    """Has a worker run each step, as one replica, on a whole global batch.

    `run` waits for it, which gives the numbers of one process. `schedule` does not, so that all
    workers run steps at once, each on weights that the others change meanwhile; what steps add to
    metrics is added on the servers and none of it is lost.

    Args:
        workers: run the steps.
    """

    def __init__(self, *args: Any, workers: WorkerPool) -> None:
        super().__init__(*args)
        self._workers = workers

    def distribute(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        require_dataset(dataset)
        return dataset

    @tf.autograph.experimental.do_not_convert
    def run(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = self._sent(step, args)
        self._workers.wait_for([result], "a step of the user's own")
        return result.fetch()

    @tf.autograph.experimental.do_not_convert
    def schedule(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._scheduled.append(self._sent(step, args))

    def reduce(self, op: ReduceOp, value: Any) -> Any:
        return value  # of the one replica

    def join(self) -> list[Any]:
        results, self._scheduled = self._scheduled, []
        self._workers.wait_for(results, "the scheduled steps")
        return [result.fetch() for result in results]

    def _sent(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Have a worker run a step; a `RemoteValue`, at once."""
        if not tf.executing_eagerly():
            raise ConfigError(
                "with parameter servers a step is sent to a worker, which a tf.function cannot do: "
                "call trainer.run or schedule outside of it (the step itself is compiled)",
                path="backend.strategy",
                value="parameter_server",
            )
        self.world.step += 1
        with adding_at_once(), sharded_variables():
            return self._workers.schedule(self._compiled(step), args)
