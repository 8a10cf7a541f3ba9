"""For people who write their own step: the strategy, its datasets, its replicas, its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from ktrainer.backends.tf_distribute.scopes import adding_at_once
from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.backends.base import Backend

_SHARDING = {"data": "DATA", "file": "FILE", "off": "OFF"}


class CustomReplicas:
    """The replicas of a strategy, for a loop of the user's own; see `ktrainer.custom`.

    Args:
        backend: `tf_distribute`, or `local`, which is one replica.

    Raises:
        ConfigError: the backend has no strategy.
    """

    def __init__(self, backend: Backend) -> None:
        if backend.name not in ("tf_distribute", "local"):
            raise ConfigError(
                f"{backend.name} has no tf.distribute strategy. Choose backend=tf_distribute (or "
                "local), or let `fit` run the steps.",
                path="backend",
                value=backend.name,
            )
        self.backend: Any = backend
        self.strategy = getattr(backend, "strategy", None) or tf.distribute.get_strategy()
        self._compiled: dict[Callable[..., Any], Any] = {}

    def distribute(self, dataset: tf.data.Dataset) -> Any:
        """Batches for `run`: each global batch of `dataset` in parts, one for a replica."""
        if self.strategy is tf.distribute.get_strategy() or self._workers is not None:
            return dataset
        policy = _SHARDING[self.backend.settings.auto_shard]
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy
        )
        return self.strategy.experimental_distribute_dataset(dataset.with_options(options))

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """What `step(*args)` returns on each replica."""
        function = self._function(step)
        if self._workers is not None:
            return self._workers.run(function, args, "a step of the user's own")
        with self._guard():
            return function(*args)

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas; nested structures too."""
        if self._workers is not None:
            return value
        with self._guard():
            return tf.nest.map_structure(
                lambda each: self.strategy.reduce(op.upper(), each, axis=None), value
            )

    @property
    def _workers(self) -> Any:
        """Who runs steps, with parameter servers; None elsewhere."""
        return getattr(self.backend, "workers", None)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """In which errors of other processes name them, and replicas may share variables."""
        guard = getattr(self.backend, "guard", nullcontext)
        layout = getattr(self.backend, "layout", None)
        shared = layout is not None and layout.strategy == "central_storage"
        with guard(), adding_at_once() if shared else nullcontext():
            yield

    def _function(self, step: Callable[..., Any]) -> Any:
        """The compiled `strategy.run` of a step, made at its first use."""
        if step not in self._compiled:
            strategy = self.strategy
            self._compiled[step] = tf.function(
                lambda *args: strategy.run(step, args=args), reduce_retracing=True
            )
        return self._compiled[step]
