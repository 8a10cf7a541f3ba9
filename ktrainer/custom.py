"""What a Trainer offers to people who write their own training loop under a strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

if TYPE_CHECKING:
    from ktrainer.backends.base import Backend


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
    def _replicas(self) -> Any:
        from ktrainer.backends.tf_distribute.custom import CustomReplicas

        return CustomReplicas(self.backend)

    @property
    def strategy(self) -> Any:
        """The `tf.distribute.Strategy` that trains."""
        return self._replicas.strategy

    def scope(self) -> AbstractContextManager[Any]:
        """In which a model, optimizers and metrics are made as the strategy wants them; without
        effect under a backend that has none."""
        scope = getattr(self.backend, "scope", nullcontext)
        return cast("AbstractContextManager[Any]", scope())

    def distribute(self, dataset: Any) -> Any:
        """Batches for `run`: each global batch of a `tf.data.Dataset`, a part for each replica."""
        return self._replicas.distribute(dataset)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step(*args)` on every replica, compiled; what it returns on each.

        Args:
            step: gets a replica's part of what `distribute` yields. Losses are divided by the
                size of the global batch: gradients are summed over replicas.
            args: batches, or anything that is the same on all replicas.
        """
        return self._replicas.run(step, *args)

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas of all processes."""
        return self._replicas.reduce(op, value)
