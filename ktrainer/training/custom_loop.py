"""The custom-loop face of a Trainer: `scope`, `distribute`, `run`, `reduce`, under any backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ktrainer.errors import ConfigError

# TensorFlow is imported where it is used: a Trainer sets it up first.
if TYPE_CHECKING:
    import tensorflow as tf

    from ktrainer.backends.backend import Backend
    from ktrainer.backends.custom_steps import CustomSteps

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
    """Steps of a loop of the user's own, on all ranks or replicas."""

    backend: Backend

    @property
    def strategy(self) -> Any:
        """The `tf.distribute.Strategy` that trains.

        Raises:
            ConfigError: the backend has none.
        """
        import tensorflow as tf

        if self.backend.name not in ("tf_distribute", "local"):
            raise ConfigError(
                f"{self.backend.name} has no tf.distribute strategy. Choose backend=tf_distribute "
                "(or local), or use `trainer.distribute`, `run` and `reduce`.",
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
        """Batches for `run`: each global batch of a `tf.data.Dataset`, a part for each replica.

        All ranks pass the same dataset, in the same order. A part may have no rows.
        """
        return self._custom_steps.distribute(dataset)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step(*args)` on every replica, compiled; what it returns on each.

        Gradients are summed over replicas where a Keras optimizer applies them, so a step divides
        its losses by the size of the *global* batch. Variables that it assigns otherwise are
        brought together as their `aggregation` says: sums of metrics, means of statistics.

        Args:
            step: gets a replica's part of what `distribute` yields.
            args: batches, or anything that is the same on all replicas.

        Raises:
            ModelError: the step assigns a variable in a way that ranks cannot share.
        """
        return self._custom_steps.run(step, args)

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas of all processes; nested
        structures too."""
        return self._custom_steps.reduce(op, value)

    @cached_property
    def _custom_steps(self) -> CustomSteps:
        return self.backend.custom_steps()
