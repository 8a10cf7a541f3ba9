"""Steps with parameter servers: workers compute, servers store, the coordinator schedules.

Each update is one function that some worker runs: it reads the weights, computes the gradients
of the whole batch and applies them, all on the servers. Its metric counts are returned with its
logs, and the coordinator adds them up, so that metrics are exact however many workers run at once.
When a worker is lost, TensorFlow has another one run its function again. The counts of the first
one are lost with it, so that no example counts twice; but an update that it has applied stays, and
is applied again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer.backends.tf_distribute.parameter_server.sharded_variables import (
    adding_at_once,
    sharded_variables,
)
from ktrainer.backends.tf_distribute.parameter_server.worker_pool import WorkerPool
from ktrainer.backends.tf_distribute.program import ReplicatedProgram
from ktrainer.backends.tf_distribute.replicas.merge_outputs import ReplicaOutcome, joined_logs
from ktrainer.backends.tf_distribute.replicas.replica_accumulation import (
    BATCH_COUNTS,
    ReplicaAccumulation,
    batch_counts,
)
from ktrainer.backends.tf_distribute.replicas.replica_step import Replicas
from ktrainer.errors import ModelError
from ktrainer.state.nested_logs import flatten_paths, path_name, unflatten_paths
from ktrainer.steps import StepOptions
from ktrainer.steps.metric_logs import LoggedResults
from ktrainer.steps.metric_states import require_sums
from ktrainer.steps.program_interface import LocalBatchLike, Logs
from ktrainer.steps.step_helpers import local_output
from ktrainer.steps.variable_assignments import aggregation_of

Places = tuple[int, ...]
_AHEAD = 4  # scheduled updates a worker


class RemoteReplicas(Replicas):
    """The one replica of the worker that runs a step; steps return their metric counts.

    Attributes:
        counted: the metric variables that steps have counted, in the order of their first use.
    """

    def __init__(self, strategy: tf.distribute.Strategy, model: keras.Model) -> None:
        super().__init__(strategy, model, None, 1)
        self.counted: list[Any] = []
        self._more: dict[int, tf.Tensor] = {}  # by place in `counted`, in the step being traced
        self._names: set[str] = set()

    def learn_names(self) -> None:
        """Read the names of the logs of metrics, which have been built."""
        self._names = set(self.model.get_metrics_result() if self.model.metrics else {})

    def counting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, returning its logs that are not metrics, and the metric counts for `add_counts`:
        in one vector of each dtype, because each tensor is a message of its own."""

        def counted(*args: Any) -> tuple[Any, dict[Places, tf.Tensor]]:
            self._more = {}
            logs = step(*args)
            more, self._more = self._more, {}
            kinds = {tensor.dtype for tensor in more.values()}
            places = [tuple(p for p in more if more[p].dtype == kind) for kind in kinds]
            return logs, {
                these: tf.concat([tf.reshape(more[p], [-1]) for p in these], 0) for these in places
            }

        return counted

    def _start_of(self, variable: Any, is_read: bool) -> tf.Tensor:
        """Zero: the values are the coordinator's, and workers count in any order."""
        return super()._start_of(variable, False)

    def add_counts(self, counted: dict[Places, np.ndarray]) -> None:
        """Add the metric counts of steps to the metrics."""
        for places, values in counted.items():
            first = 0
            for variable in (self.counted[place] for place in places):
                last = first + math.prod(variable.shape)
                variable.assign_add(values[first:last].reshape(variable.shape))
                first = last

    def conclude(self, outcome: ReplicaOutcome, logs: list[Any], logged: LoggedResults) -> Any:
        """Assign statistics, keep metric counts; return the logs that are not metrics.

        Raises:
            ModelError: the step resets a metric, or adds to a statistic, whose counts arrive in any
                order.
        """
        for variable, value in outcome.statistics:
            if aggregation_of(variable) == "sum":
                raise ModelError(
                    f"a step of {type(self.model).__name__} changes {variable.path}, a statistic "
                    'with aggregation="sum", but workers run several steps at once, and would '
                    "overwrite one another's counts. Count in a metric, or choose another strategy."
                )
            variable.assign(value)
        for variable, constant, parts in outcome.metrics:
            if constant is not None:
                raise ModelError(
                    f"a step of {type(self.model).__name__} resets a metric ({variable.path}), but "
                    "workers run several steps at once. Reset it in a callback, or choose another "
                    "strategy."
                )
            place = self._place_of(variable)
            before = [self._more[place]] if place in self._more else []
            self._more[place] = tf.add_n([*before, *parts])
        joined = joined_logs(logs, outcome.weights, {})
        if not isinstance(joined, dict):
            return joined
        values = flatten_paths(joined)
        counted = logged.of_metrics(values, self._names)
        return {path_name(path): value for path, value in values.items() if path not in counted}

    def _place_of(self, variable: Any) -> int:
        for place, each in enumerate(self.counted):
            if each is variable:
                return place
        self.counted.append(variable)
        return len(self.counted) - 1

    @contextmanager
    def _replica_patches(self, metrics: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super()._replica_patches(metrics))
            stack.enter_context(sharded_variables())
            stack.enter_context(adding_at_once())
            yield


class CoordinatedProgram(ReplicatedProgram):
    """The steps of one model, run by the workers of a cluster.

    Args:
        model: a compiled Keras model.
        options: how steps run.
        replicas: the replica on a worker.
        workers: run the steps.
        each_step: wait for the workers after each update.
    """

    def __init__(
        self,
        model: keras.Model,
        options: StepOptions,
        replicas: RemoteReplicas,
        workers: WorkerPool,
        each_step: bool,
    ) -> None:
        super().__init__(model, options, replicas, workers.guard)
        self._remote, self._workers, self._each_step = replicas, workers, each_step
        self._waiting: deque[Any] = deque()
        self._logs: Logs = {}
        self._kind = ""

    def build(self, spec: Any, training: bool = True) -> None:
        if self._specs.get("train" if training else "test") is spec:
            return
        super().build(spec, training)
        why = "they cannot be counted on workers"
        require_sums(self.model, why, "choose another strategy")
        self._remote.learn_names()

    def train(self, local_batches: Sequence[LocalBatchLike]) -> Logs:
        if self.options.accumulate == 1:
            return self._schedule("train", local_batches[0].batch, *batch_counts(local_batches))
        batches = tuple(local_batch.batch for local_batch in local_batches)
        counts = tuple(batch_counts(local_batches))
        return self._schedule("update", batches, counts, parts=len(batches))

    def test(self, local_batch: LocalBatchLike) -> Logs:
        return self._schedule("test", local_batch.batch, *batch_counts([local_batch]))

    def predict(self, local_batch: LocalBatchLike) -> Any:
        self.finish()
        self._renew()
        self._place_for_prediction(local_batch)
        outputs = self._workers.run(
            self._function("predict"),
            _tensors(local_batch.batch, *batch_counts([local_batch])),
            "a prediction",
        )
        return keras.tree.map_structure(local_output, outputs)

    def finish(self) -> Logs | None:
        """Wait for all workers, and add up their counts."""
        if not self._waiting:
            return None
        self._settle(0)
        return self._logs

    def abandon(self) -> None:
        self._logs = {}

    def finalize_weights(self) -> None:
        with sharded_variables():
            super().finalize_weights()

    def _schedule(self, kind: str, batch: Any, counts: Any, *, parts: int = 0) -> Logs:
        """Have a worker run a step; return the newest known logs of its kind.

        Args:
            parts: how many batches an update is made of; 0: `batch` is one, not a sequence of them.
        """
        if kind != self._kind:
            self.finish()
            self._kind, self._logs = kind, {}
        self._renew()
        function = self._function(kind, parts)
        self._waiting.append(self._workers.schedule(function, _tensors(batch, counts)))
        if self._each_step or not self._logs:
            self.finish()
        elif len(self._waiting) > _AHEAD * self._workers.count:
            self._settle(self._workers.count)
        return self._logs

    def _settle(self, leave: int) -> None:
        """Wait for all but the newest few steps, and count them. After an error the remaining ones
        are dropped: they belong to a `fit` that is over."""
        try:
            self._workers.wait_for(list(islice(self._waiting, len(self._waiting) - leave)))
            self._take(leave)
        except Exception:
            self._waiting.clear()
            raise

    def _take(self, leave: int) -> None:
        """Count all but the newest few steps, which have ended, and update the logs."""
        total: dict[Places, np.ndarray] = {}
        while len(self._waiting) > leave:
            self._logs, counted = self._waiting.popleft().fetch()
            for places, values in counted.items():
                total[places] = total[places] + values if places in total else values
        self._remote.add_counts(total)
        if isinstance(self._logs, dict):
            logged = self._logged["test" if self._kind == "test" else "train"]
            known = {
                p: self._logs[path_name(p)]
                for p in flatten_paths(logged.logs)
                if path_name(p) in self._logs
            }
            self._logs = unflatten_paths(logged.logs, {**known, **logged.now(logged.logs)})

    def _function(self, kind: str, parts: int = 0) -> Callable[..., Any]:
        """The function of a kind of step.

        It is traced with an unknown number of rows: with a static one, lookups of positions could
        not be told from lookups of examples (`mark_common`).
        """
        name = f"{kind} {parts}" if parts else kind
        if name not in self._functions:
            step: Callable[..., Any] = self._predict
            if kind != "predict":
                step = self._update if kind == "update" else self._traced(kind)
                step = self._remote.counting(step)
            spec = self._specs.get("train" if kind == "update" else kind)
            of_one = [spec, BATCH_COUNTS]
            signature = [(each,) * parts for each in of_one] if parts else of_one
            self._functions[name] = tf.function(
                step,
                input_signature=None if spec is None else signature,
                reduce_retracing=True,
                autograph=False,
            )
        return self._functions[name]

    def _update(self, batches: tuple[Any, ...], counts: tuple[tf.Tensor, ...]) -> Any:
        """One update of several local batches, in one function."""
        update = ReplicaAccumulation(
            self.model,
            self.options,
            self.replicas,
            self._specs.get("train"),
            self._logged["train"],
            compiled=False,
        )
        return update(list(zip(batches, counts, strict=True)))


def _tensors(*structures: Any) -> tuple[Any, ...]:
    """Batches as tensors: functions for workers are looked up by the types of their arguments."""
    return keras.tree.map_structure(
        lambda part: tf.convert_to_tensor(part) if isinstance(part, np.ndarray) else part,
        structures,
    )
