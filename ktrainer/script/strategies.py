"""A script's own `tf.distribute` strategies: the backend's, or one replica."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ktrainer.script.bootstrap import say

if TYPE_CHECKING:
    from ktrainer.script.replace import Replacements
    from ktrainer.trainer import Trainer

_NAMES = (
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
)
_EXPERIMENTAL = (
    "CentralStorageStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
)


def route_strategies(trainer: Trainer, replaced: Replacements) -> None:
    """Have the constructors of strategies return the backend's strategy, or the default one."""

    def proxy(original: type) -> type:
        return _StrategyClassProxy(
            original.__name__, (), {"original": original, "trainer": trainer}
        )

    for module, names in (
        (tf.distribute, _NAMES),
        (tf.distribute.experimental, _EXPERIMENTAL),
    ):
        for name in names:
            if name in vars(module):
                replaced.replace(module, name, proxy)


class _StrategyClassProxy(type):
    """The metaclass of what takes the place of a class of strategies."""

    original: type
    trainer: Trainer

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return StrategyProxy(cls.trainer, cls.original.__name__)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.original)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


class StrategyProxy:
    """What a script gets for a strategy that it makes: the backend's, with the backend's scope.

    Args:
        trainer: whose backend it is.
        name: the class that the script asked for.
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        own = getattr(trainer.backend, "strategy", None)
        self._strategy = tf.distribute.get_strategy() if own is None else own
        self._backend = trainer.backend
        if own is None:
            say(
                f"{name} has no effect with backend={trainer.backend.name}; it does with "
                "backend=tf_distribute (and backend.strategy, backend.devices)"
            )

    def scope(self) -> AbstractContextManager[Any]:
        """In which variables are made as the backend wants them."""
        scope = getattr(self._backend, "scope", self._strategy.scope)
        result: AbstractContextManager[Any] = scope()
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)
