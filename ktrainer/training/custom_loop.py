"""The custom-loop face of a Trainer: distribute batches, run steps, reduce results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ktrainer.errors import ConfigError
from ktrainer.runtime.monkeypatching import replaced

# TensorFlow is imported where it is used: a Trainer sets it up first.
if TYPE_CHECKING:
    import tensorflow as tf

    from ktrainer.backends.backend import Backend
    from ktrainer.config import Config
    from ktrainer.training.user_steps import Steps, StepsTrainer

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
    _config: Config
    _checked_config: Config | None = None
    _has_setting_of_updates = False

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

        Raises:
            ConfigError: it applies an optimizer, and a setting of updates would have no effect.
        """
        with self._settings_of_updates_refused():
            return self.backend.loop.run(step, args)

    @leaves_strategy_scope
    def steps(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        verbose: int | str | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        state: dict[str, Any] | None = None,
        callbacks: Any = None,
        shuffle: bool | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
    ) -> Steps:
        """The batches of all epochs, for `run`, with what `fit` gives around each step: resume,
        checkpoints, signals, the learning rate, the NaN guard, progress and loggers, healing.

        Args:
            x, y, sample_weight: as in `fit`; `x` may also be what `distribute` returns.
            batch_size, epochs, verbose, callbacks, shuffle: as in `fit`.
            initial_epoch, steps_per_epoch: as in `fit`.
            model: the models that are trained, built: one, or several in a list or dict.
            optimizer: their optimizers: one, or several in a list or dict.
            state: whatever else a checkpoint must hold, by name: metrics, variables, random
                generators, more models and optimizers, and plain values, which the loop changes in
                this dict.

        Raises:
            ConfigError: a setting that only `fit` can follow, or a backend without such loops.
            DataError, ModelError: what was given cannot be trained on, or saved.
        """
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "model", "optimizer", "state")
        }
        began = time.perf_counter()
        from ktrainer.training.user_steps import open_steps

        return open_steps(
            cast("StepsTrainer", self), began, self._config, model, optimizer, state, **given
        )

    def reduce(self, op: Literal["sum", "mean"], value: Any) -> Any:
        """A result of `run`, summed or averaged over all replicas of all processes; nested
        structures too."""
        return self.backend.loop.reduce(op, value)

    def schedule(self, step: Callable[..., Any], *args: Any) -> None:
        """Have `step(*args)` run, asynchronously under `parameter_server`: there it returns at
        once, and several workers run steps at the same time. Elsewhere it is `run`."""
        with self._settings_of_updates_refused():
            self.backend.loop.schedule(step, args)

    def join(self) -> list[Any]:
        """Wait for all scheduled steps; return their results, in the order in which they were
        scheduled, each summed over replicas."""
        return self.backend.loop.join()

    @contextmanager
    def _settings_of_updates_refused(self) -> Iterator[None]:
        """Context in which a step that applies an optimizer raises an error, if a setting would
        have no effect on it."""
        from ktrainer.training.user_steps import setting_of_updates

        if self._checked_config is not self._config:
            self._checked_config = self._config
            self._has_setting_of_updates = setting_of_updates(self._config) is not None
        if not self._has_setting_of_updates:
            yield
            return
        import keras

        errors: list[ConfigError] = []

        def apply(*_: Any, **__: Any) -> None:
            error = setting_of_updates(self._config)
            assert error is not None
            errors.append(error)
            raise error

        try:
            with replaced((keras.optimizers.Optimizer, "apply", apply)):
                yield
        except Exception:
            if not errors:
                raise
            raise errors[0] from None  # TensorFlow has made one of its own of it
