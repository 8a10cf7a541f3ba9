"""Replace `tf.distribute` strategies of a script by the backend's, or by a single replica."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from ktrainer.runtime.monkeypatching import Replacements
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
    """Make the constructors of strategies return the backend's strategy, or the default one."""

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
                replaced.wrap(module, name, proxy)


class _StrategyClassProxy(type):
    """Metaclass of the replacement of a class of strategies."""

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
    """The backend's strategy and scope, in place of a strategy that the script creates.

    Args:
        trainer: the Trainer of the backend.
        name: the class that the script called.
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        own = trainer.backend.strategy
        self._strategy = tf.distribute.get_strategy() if own is None else own
        self._backend = trainer.backend
        if own is None and trainer.world.is_root:
            print(
                f"ktrainer run: {name} has no effect with backend={trainer.backend.name}; it does "
                "with backend=tf_distribute (and backend.strategy, backend.devices)",
                file=sys.stderr,
                flush=True,
            )

    def scope(self) -> AbstractContextManager[Any]:
        """The scope in which the backend creates variables."""
        scope = getattr(self._backend, "scope", self._strategy.scope)
        result: AbstractContextManager[Any] = scope()
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._strategy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)
