"""The custom-loop face of a Trainer: the strategy, its datasets, its replicas, its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ktrainer.errors import ConfigError

# TensorFlow is imported where it is used: a Trainer sets it up first.
if TYPE_CHECKING:
    import tensorflow as tf

    from ktrainer.backends.backend import Backend

_SHARDING = {"data": "DATA", "file": "FILE", "off": "OFF"}

Method = TypeVar("Method", bound=Callable[..., Any])


def leaves_strategy_scope(method: Method) -> Method:
    """A method of a Trainer that may be called in any strategy's scope, and leaves it meanwhile."""

    @wraps(method)
    def outside(self: CustomLoop, *args: Any, **named: Any) -> Any:
        from ktrainer.steps.strategy_scope import outside_strategy_scope

        # Replicas have their devices; elsewhere the user's `tf.device(...)` decides.
        with outside_strategy_scope(device=self.backend.name == "tf_distribute"):
            return method(self, *args, **named)

    return cast("Method", outside)


class CustomLoop:
    """The strategy of `backend=tf_distribute`, its replicas and their sums; `local` has one."""

    backend: Backend

    @cached_property
    def strategy(self) -> Any:
        """The `tf.distribute.Strategy` that trains.

        Raises:
            ConfigError: the backend has none.
        """
        import tensorflow as tf

        if self.backend.name not in ("tf_distribute", "local"):
            raise ConfigError(
                f"{self.backend.name} has no tf.distribute strategy. Choose backend=tf_distribute "
                "(or local), or let `fit` run the steps.",
                path="backend",
                value=self.backend.name,
            )
        return getattr(self.backend, "strategy", None) or tf.distribute.get_strategy()

    def scope(self) -> AbstractContextManager[Any]:
        """Context in which a model, optimizers and metrics are made as the strategy wants them;
        without effect under a backend that has none."""
        scope = getattr(self.backend, "scope", nullcontext)
        return cast("AbstractContextManager[Any]", scope())

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        """Batches for `run`: each global batch of a `tf.data.Dataset`, a part for each replica."""
        import tensorflow as tf

        if self.strategy is tf.distribute.get_strategy() or self._workers is not None:
            return dataset
        backend: Any = self.backend
        policy = _SHARDING[backend.settings.auto_shard]
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy
        )
        return self.strategy.experimental_distribute_dataset(dataset.with_options(options))

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step(*args)` on every replica, compiled; what it returns on each.

        Args:
            step: gets a replica's part of what `distribute` yields. Losses are divided by the
                size of the global batch: gradients are summed over replicas.
            args: batches, or anything that is the same on all replicas.
        """
        function = self._compiled(step)
        if self._workers is not None:
            return self._workers.run(function, args, "a step of the user's own")
        with self._guarded():
            return function(*args)

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas of all processes; nested
        structures too."""
        import tensorflow as tf

        strategy = self.strategy
        if self._workers is not None:
            return value
        with self._guarded():
            return tf.nest.map_structure(
                lambda each: strategy.reduce(op.upper(), each, axis=None), value
            )

    @property
    def _workers(self) -> Any:
        """The workers that run steps, with parameter servers; else None."""
        return getattr(self.backend, "workers", None)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Context in which errors name lost processes, and replicas may share variables."""
        from ktrainer.backends.tf_distribute.replicas.replica_scopes import adding_at_once

        guard = getattr(self.backend, "guard", nullcontext)
        layout = getattr(self.backend, "layout", None)
        shared = layout is not None and layout.strategy == "central_storage"
        with guard(), adding_at_once() if shared else nullcontext():
            yield

    @cached_property
    def _steps(self) -> dict[Callable[..., Any], Any]:
        return {}

    def _compiled(self, step: Callable[..., Any]) -> Any:
        """The compiled `strategy.run` of a step, made at its first use."""
        import tensorflow as tf

        if step not in self._steps:
            strategy = self.strategy
            self._steps[step] = tf.function(
                lambda *args: strategy.run(step, args=args), reduce_retracing=True
            )
        return self._steps[step]
