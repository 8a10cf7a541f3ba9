"""The steps of parameter servers: workers compute, servers keep, the coordinator says what.

Each update is one function that some worker runs: it reads the weights, computes the gradients
of the whole batch and applies them, all on the servers. What its metrics have counted is added to
sums on the servers too, which lose nothing when a worker dies, and read from there, so that
metrics are exact however many workers run at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.accumulate import Accumulated, facts_of
from ktrainer.backends.tf_distribute.outputs import joined_logs
from ktrainer.backends.tf_distribute.program import ReplicatedProgram, Share
from ktrainer.backends.tf_distribute.replicas import Outcome, Replicas
from ktrainer.backends.tf_distribute.scopes import adding_at_once
from ktrainer.backends.tf_distribute.sharded import sharded_variables
from ktrainer.backends.tf_distribute.workers import Workers
from ktrainer.steps import StepOptions
from ktrainer.steps.base import Logs
from ktrainer.steps.logged import LoggedResults
from ktrainer.steps.metric_states import require_sums
from ktrainer.steps.model_step import ShareLike

_AHEAD = 4  # updates a worker that may wait


class RemoteReplicas(Replicas):
    """The one replica of whichever worker runs a step. Its metrics are sums on the servers."""

    def __init__(self, strategy: tf.distribute.Strategy, model: keras.Model) -> None:
        super().__init__(strategy, model, None, 1)
        self.sums: dict[int, tf.Variable] = {}
        self._names: set[str] = set()

    def make_sums(self) -> None:
        """Make the sums of the metrics' variables, which have been built."""
        with self.strategy.scope():
            for variable in self.model.metrics_variables:
                if id(variable) not in self.sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self.sums[id(variable)] = tf.Variable(zeros, trainable=False)
        self._names = set(self.model.get_metrics_result() if self.model.metrics else {})

    def conclude(self, outcome: Outcome, logs: list[Any], logged: LoggedResults) -> Any:
        """Assign statistics, count metrics; returns the logs that are no metrics'."""
        for variable, value in outcome.statistics:
            variable.assign(value)
        for variable, parts in outcome.metrics:
            self.sums[id(variable)].assign_add(tf.add_n(parts))
        joined = joined_logs(logs, outcome.weights, {})
        if not isinstance(joined, dict):
            return joined
        counted = logged.of_metrics(joined, self._names)
        return {key: value for key, value in joined.items() if key not in counted}

    @contextmanager
    def _seams(self, metrics: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super()._seams(metrics))
            stack.enter_context(sharded_variables())
            stack.enter_context(adding_at_once())
            yield


class CoordinatedProgram(ReplicatedProgram):
    """The steps of one model, run by the workers of a cluster.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        replicas: what a step is on a worker.
        workers: who runs them.
        each_step: wait for the workers after each update.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: RemoteReplicas,
        workers: Workers,
        each_step: bool,
    ) -> None:
        super().__init__(model, options, replicas, workers.guard)
        self._remote, self._workers, self._each_step = replicas, workers, each_step
        self._waiting: deque[Any] = deque()
        self._logs: Logs = {}
        self._kind = ""
        self._before: list[np.ndarray] | None = None  # the metrics, without the servers' sums

    def build(self, spec: Any, training: bool = True) -> None:
        super().build(spec, training)
        why = "they cannot be counted on workers"
        require_sums(self.model, why, "choose another strategy")
        self._remote.make_sums()

    def train(self, shares: Sequence[ShareLike]) -> Logs:
        if self.options.accumulate == 1 and not self.options.xla:
            return self._schedule("train", shares[0].batch, *facts_of(shares))
        batches = tuple(share.batch for share in shares)
        return self._schedule("update", batches, tuple(facts_of(shares)))

    def test(self, share: ShareLike) -> Logs:
        return self._schedule("test", share.batch, *facts_of([share]))

    def predict(self, share: ShareLike) -> Any:
        self.finish()
        self._renew()
        self._place_for_prediction(share)
        outputs = self._workers.run(
            self._function("predict"), _tensors(share.batch, *facts_of([share])), "a prediction"
        )
        return keras.tree.map_structure(np.asarray, outputs)

    def finish(self) -> Logs | None:
        """Wait for all workers, and count what they have done."""
        if not self._waiting:
            return None
        self._workers.wait_for(self._waiting)
        while self._waiting:
            self._take()
        self._count(reset=True)
        return self._logs

    def _schedule(self, kind: str, batch: Any, facts: Any) -> Logs:
        """Have a worker run a step; the logs of the newest one of its kind that is known."""
        if kind != self._kind:
            self.finish()
            self._kind, self._logs = kind, {}
        self._renew()
        function = self._function(kind)
        if self._before is None:
            self._before = [np.array(v.numpy()) for v in self.model.metrics_variables]
        self._waiting.append(self._workers.schedule(function, _tensors(batch, facts)))
        if self._each_step or not self._logs:
            self.finish()
        elif len(self._waiting) > _AHEAD * self._workers.count:
            few = self._workers.count
            self._workers.wait_for([self._waiting[i] for i in range(len(self._waiting) - few)])
            while len(self._waiting) > few:
                self._take()
            self._count()
        return self._logs

    def _take(self) -> None:
        """The logs of the oldest step that are no metrics'; kept by the worker that ran it."""
        result = self._waiting.popleft()
        with suppress(tf.errors.UnavailableError):  # that worker has died since
            self._logs = result.fetch()

    def _count(self, reset: bool = False) -> None:
        """Bring the metrics, and with them the logs, up to date; sums begin anew on `reset`."""
        with self._workers.guard(), self._workers.in_time("read the sums of metrics"):
            pairs = zip(self.model.metrics_variables, self._before or (), strict=True)
            for variable, before in pairs:
                variable.assign(before + self._remote.sums[id(variable)].numpy())
            for total in self._remote.sums.values() if reset else ():
                total.assign(tf.zeros_like(total))
        if reset:
            self._before = None
        if isinstance(self._logs, dict):
            logged = self._logged["test" if self._kind == "test" else "train"]
            values = {**self._logs, **logged.now(logged.keys)}
            self._logs = {key: values[key] for key in logged.keys if key in values}

    def _function(self, kind: str) -> Callable[..., Any]:
        if kind not in self._functions:
            if kind == "update":
                step: Callable[..., Any] = self._update
            elif kind == "predict":
                step = self._predict
            else:
                step = self._traced(kind)
            spec = self._specs.get(kind)
            signature = None if spec is None or kind == "update" else [spec, Share]
            self._functions[kind] = tf.function(
                step, input_signature=signature, reduce_retracing=True, autograph=False
            )
        return self._functions[kind]

    def _update(self, batches: tuple[Any, ...], facts: tuple[tf.Tensor, ...]) -> Any:
        """One update of several shares, in one function."""
        update = Accumulated(
            self.model,
            self.options,
            self.replicas,
            self._specs.get("train"),
            self._logged["train"],
            compiled=False,
        )
        return update.of(list(zip(batches, facts, strict=True)))


def _tensors(*structures: Any) -> tuple[Any, ...]:
    """Batches as tensors: functions for workers are chosen by the types of their arguments."""
    return keras.tree.map_structure(
        lambda part: tf.convert_to_tensor(part) if isinstance(part, np.ndarray) else part,
        structures,
    )
