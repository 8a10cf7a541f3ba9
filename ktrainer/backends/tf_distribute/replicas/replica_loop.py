"""A training loop of the user's own under a strategy: its step on each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import _DefaultDistributionExtended

from ktrainer.backends.tf_distribute.replicas.replica_scopes import (
    ReplicaContexts,
    ReplicaScope,
    traced_on_replicas,
    with_settings_of_this_thread,
)
from ktrainer.backends.user_loop import ReduceOp, UserLoop, wide_type
from ktrainer.data.distributed_dataset import require_dataset
from ktrainer.data.local_batch import LocalBatch
from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.distributed.world import World
from ktrainer.steps.assigned_variables import over_all_ranks
from ktrainer.steps.loop_step import as_function, loop_context, loop_patches
from ktrainer.steps.step_context import StepContext
from ktrainer.steps.variable_assignments import aggregation_of, assign_total

Guard = Callable[[], AbstractContextManager[None]]


class StrategyLoop(UserLoop):
    """Runs steps by `strategy.run`, as TensorFlow does; of a strategy with one replica.

    Args:
        world: the processes.
        strategy: whose replicas run the steps.
        guard: context in which errors name lost processes.
        auto_shard: how processes share the data, a name of `AutoShardPolicy`.
    """

    def __init__(
        self, world: World, strategy: tf.distribute.Strategy, guard: Guard, auto_shard: str
    ) -> None:
        super().__init__(world)
        self._strategy, self._guard, self._auto_shard = strategy, guard, auto_shard

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        require_dataset(dataset)
        if isinstance(self._strategy.extended, _DefaultDistributionExtended):
            return dataset
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, self._auto_shard.upper()
        )
        made = self._strategy.experimental_distribute_dataset(dataset.with_options(options))
        made.global_batches = dataset  # for `trainer.steps`, which reads it as `fit` does
        return made

    def rows(self, local: LocalBatch) -> Any:
        count = self._local_replicas
        if count == 1:
            return local.rows()
        with tf.device("CPU:0"):  # else the whole batch would be copied to the first GPU
            parts = [tf.nest.flatten(local.rows(number, count)) for number in range(count)]
        first = self.world.replica * count if self.world.size > 1 else 0

        def of_replica(context: Any) -> list[Any]:
            return parts[context.replica_id_in_sync_group - first]

        leaves = self._strategy.experimental_distribute_values_from_function(of_replica)
        return tf.nest.pack_sequence_as(local.batch, leaves)

    @property
    def _local_replicas(self) -> int:
        return len(self._strategy.extended.worker_devices)

    @tf.autograph.experimental.do_not_convert
    def reduce(self, op: ReduceOp, value: Any) -> Any:
        def reduced(each: Any) -> Any:
            if each is None:
                return None
            is_whole = wide_type(tf.convert_to_tensor(self._first(each))) == tf.int64
            found = self._strategy.reduce(op.upper(), each, axis=None)
            return tf.cast(found, tf.float64) if op == "mean" and is_whole else found

        with self._guard():
            return tf.nest.map_structure(reduced, value)

    def _first(self, value: Any) -> Any:
        return self._strategy.experimental_local_results(value)[0]

    def _compile(self, step: Callable[..., Any]) -> Any:
        strategy = self._strategy
        return tf.function(lambda *args: strategy.run(step, args=args), reduce_retracing=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with super()._explained(), self._guard():
            yield


class ReplicaLoop(StrategyLoop):
    """Runs steps on several replicas; their sums are those of one process.

    What a replica assigns is kept in a scope of its own, and reduced at the end of the step.

    Args:
        world, strategy, guard, auto_shard: as for `StrategyLoop`.
        collectives: sums over replicas.
    """

    def __init__(self, *args: Any, collectives: GradientCollectives) -> None:
        super().__init__(*args)
        self._collectives = collectives
        self._contexts = ReplicaContexts(self._first)

    def _compile(self, step: Callable[..., Any]) -> Any:
        function = as_function(step)

        def on_replicas(*args: Any) -> Any:
            with (
                loop_patches(self._contexts.as_one()),
                traced_on_replicas(self._contexts, self._local_replicas),
            ):
                on_each = with_settings_of_this_thread(lambda *own: self._on_each(function, own))
                return self._strategy.run(on_each, args=args)

        return tf.function(on_replicas, autograph=False, reduce_retracing=True)

    def _on_each(self, step: Any, args: tuple[Any, ...]) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        context = loop_context(args, self._collectives, number)
        context.merge_replicas = self._contexts.update_once
        with (
            self._contexts.entered(context),
            ReplicaScope((), self._assign_weight, context.assigned) as scope,
        ):
            result = step(*args)
            self._assign_all(context, scope)
        return result

    def _assign_weight(self, variable: Any, value: Any) -> None:
        """Assign a weight in the middle of a step: the first replica's value, on all."""
        value = self._contexts.of_first_replica(tf.convert_to_tensor(value))
        self._merge([(variable, value, False)])

    def _assign_all(self, context: StepContext, scope: ReplicaScope) -> None:
        """Assign what the replicas have assigned in their scopes, reduced over all of them."""
        variables = list(scope.assigned.values())
        values = [scope.get_current_value(variable) for variable in variables]
        kinds = [aggregation_of(variable) for variable in variables]
        before = [scope.before(variable) for variable in variables]
        places = [i for i, kind in enumerate(kinds) if kind is not None]
        if places:
            chosen = [str(kinds[i]) for i in places]
            old, new = [before[i] for i in places], [values[i] for i in places]
            every = over_all_ranks(context, chosen, old, new)
            for i, value in zip(places, every, strict=True):
                if id(variables[i]) in scope.constants:
                    value += tf.cast(before[i], tf.float64)
                values[i] = tf.cast(value, values[i].dtype)
        adds = [
            kind == "sum" and id(variable) not in scope.constants
            for kind, variable in zip(kinds, variables, strict=True)
        ]
        if variables:
            self._merge(list(zip(variables, values, adds, strict=True)))

    def _merge(self, changes: list[tuple[Any, tf.Tensor, bool]]) -> None:
        """Assign, or add, values that are the same on all replicas, once for all of them.

        A metric's variable may be in parts, one a replica, of which its value is the sum: outside
        of replicas it is read, and assigned, as one.
        """

        is_first = self.world.is_first_replica

        def assign(values: list[Any]) -> None:
            for (variable, _, adds), value in zip(changes, values, strict=True):
                assign_total(variable, variable.value + value if adds else value, is_first)

        self._contexts.call_once(assign, [value for _, value, _ in changes])
