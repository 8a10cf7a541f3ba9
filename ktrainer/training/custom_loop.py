"""The custom-loop face of a Trainer: distribute batches, run steps, reduce results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ktrainer.errors import ConfigError

# TensorFlow is imported where it is used: a Trainer sets it up first.
if TYPE_CHECKING:
    import tensorflow as tf

    from ktrainer.backends.backend import Backend

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
    """Training loops of the user's own, which run alike under every backend but `pipeline`."""

    backend: Backend

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The `tf.distribute.Strategy` that trains; under `local` TensorFlow's default.

        Raises:
            ConfigError: the backend has none.
        """
        import tensorflow as tf

        backend = self.backend
        if backend.strategy is None and backend.name != "local":
            raise ConfigError(
                f"{backend.name} has no tf.distribute strategy. The number of replicas is "
                "trainer.world.replicas. Choose backend=tf_distribute (or local) where a strategy "
                "is needed.",
                path="backend",
                value=backend.name,
            )
        return backend.strategy or tf.distribute.get_strategy()

    def scope(self) -> AbstractContextManager[Any]:
        """Context in which a model, optimizers and metrics are made as the backend wants them."""
        return self.backend.scope()

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        """Batches for `run`: each global batch of a `tf.data.Dataset`, a part for each replica.

        Raises:
            ConfigError: the backend, or `data.shard`, cannot do it.
            DataError: it is no dataset of batches.
            DivergenceError: ranks have different data.
        """
        return self.backend.loop.distribute(dataset)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step(*args)` on every replica, compiled; what it returns on each.

        Args:
            step: gets a replica's part of what `distribute` yields. Losses are divided by the
                size of the global batch: gradients are summed over replicas.
            args: batches, or anything that is the same on all replicas.
        """
        return self.backend.loop.run(step, args)

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas of all processes; nested
        structures too."""
        return self.backend.loop.reduce(op, value)

    def schedule(self, step: Callable[..., Any], *args: Any) -> None:
        """Have `step(*args)` run, asynchronously under `parameter_server`: there it returns at
        once, and several workers run steps at the same time. Elsewhere it is `run`."""
        self.backend.loop.schedule(step, args)

    def join(self) -> list[Any]:
        """Wait for all scheduled steps; return their results, in the order in which they were
        scheduled, each summed over replicas."""
        return self.backend.loop.join()
