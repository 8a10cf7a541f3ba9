"""The workers of a cluster with parameter servers, which run functions for the coordinator.

WorkerPool  runs functions on free workers
WorkerLoop  runs the steps of a loop of the user's own
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from ktrainer.backends.tf_distribute.parameter_server.liveness import Liveness
from ktrainer.backends.tf_distribute.parameter_server.sharded_variables import (
    adding_at_once,
    sharded_variables,
)
from ktrainer.backends.tf_distribute.replicas.replica_loop import StrategyLoop
from ktrainer.backends.user_loop import ReduceOp
from ktrainer.data.distributed_dataset import require_dataset
from ktrainer.distributed import World
from ktrainer.errors import ConfigError, DeadlineExceeded, PeerLost

_POLL_SECONDS = 0.0005
_LIVENESS_SECONDS = 0.5  # between two checks of liveness
_GRACE_SECONDS = 3.0  # for `wait_for` to name the stopped process first


class WorkerPool:
    """Runs functions on free workers.

    Args:
        strategy: the coordinator's.
        liveness: of workers and servers.
        world: its step is named in errors.
        timeout: seconds in which some function must end, while any is under way.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, liveness: Liveness, world: World, timeout: float
    ) -> None:
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._liveness, self._world, self._timeout = liveness, world, timeout
        self._reported = False  # the stopped process
        self.count = len(liveness.tasks("worker"))

    def schedule(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Have a worker run a compiled function; a `RemoteValue`, at once."""
        with self.guard():
            return self._coordinator.schedule(function, args=tuple(args))

    def run(self, function: Callable[..., Any], args: Sequence[Any], what: str) -> Any:
        """Have a worker run it, wait, and return its result, as tensors."""
        result = self.schedule(function, args)
        self.wait_for([result], what)
        return result.get()  # `fetch` makes arrays of ragged tensors, too

    def wait_for(self, results: Sequence[Any], what: str = "updates of the workers") -> None:
        """Wait until all of `results` are computed.

        Raises:
            DeadlineExceeded: no result has arrived for `timeout` seconds.
            PeerLost: a server is lost, or a process does not answer; it is named.
        """
        results = list(results)
        progress, since, checked = -1, time.monotonic(), 0.0
        while True:
            # What a worker has computed is copied from there, and it may stop in between.
            ready = sum(result._has_fetched_to_local for result in results)
            if ready == len(results):
                break
            self._raise_errors(results)
            now = time.monotonic()
            if ready != progress:
                progress, since = ready, now
            if now - checked > _LIVENESS_SECONDS:
                checked = now
                self._check_liveness(what)
            if now - since > self._timeout:
                others = f"Not there: {self._liveness.missing() or 'none'}."
                others += f"\n{self._liveness.stack_dumps()}"
                raise DeadlineExceeded(
                    0, self._world.step, what, self._timeout, others, "backend.timeout"
                )
            time.sleep(_POLL_SECONDS)
        with self.guard():
            self._coordinator.done()  # raises what a function has raised

    def _raise_errors(self, results: Sequence[Any]) -> None:
        """Raise what one of the functions has raised."""
        for result in results:
            if result._status_available_event.is_set() and result._error is not None:
                with self.guard():
                    self._coordinator.done()  # raises the first one; the others are cancelled
                    raise result._error

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn TensorFlow's errors of a lost process into ours, which name it."""
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            raise self._lost(self._liveness.missing()) from error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the coordinator itself may read from servers, or save their weights.

        If one has stopped, TensorFlow waits without a deadline and cannot be interrupted: this
        process then prints an error and exits.

        Raises:
            PeerLost: a server is lost.
        """
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name="watch", daemon=True)
        watch.start()
        try:
            yield
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            if not (missing := self._liveness.missing("ps")):
                raise  # of something else, such as a remote file
            raise self._lost(missing) from error
        finally:
            over.set()
            watch.join()

    @property
    def lost_weights(self) -> bool:
        """True if a server is lost, or has stopped."""
        return bool(self._liveness.missing("ps") or self._liveness.silent("ps"))

    def _watch(self, over: threading.Event) -> None:
        since = None
        while not over.wait(_LIVENESS_SECONDS) and not self._reported:
            if not (silent := self._liveness.silent("ps")):
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > _GRACE_SECONDS:
                error = self._stopped(silent, "a read from the servers")
                print(f"PeerLost: {error}", file=sys.stderr, flush=True)
                os._exit(1)

    def _check_liveness(self, what: str) -> None:
        """Raise if a process has stopped sending heartbeats: TensorFlow would wait for ever."""
        with self.guard():
            self._coordinator.done()
        if silent := self._liveness.silent():
            self._reported = True
            raise self._stopped(silent, what)

    def _stopped(self, silent: str, what: str) -> PeerLost:
        return PeerLost(
            f"the coordinator receives no heartbeat from {silent}, at step {self._world.step} in "
            f"{what!r}. It has stopped; end it, and start again from the last checkpoint.\n"
            f"{self._liveness.stack_dumps()}"
        )

    def _lost(self, missing: str) -> PeerLost:
        return PeerLost(
            f"the coordinator lost {missing or 'a process of the cluster'} at step "
            f"{self._world.step}, and with it weights. Start again from the last checkpoint."
        )


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
