"""Replace `tf.distribute` strategies of a script by the backend's, or by a single replica, and drop
the devices that it sets where the backend has set them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
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
_DEVICES = {
    tf.config: ("set_visible_devices", "set_logical_device_configuration"),
    tf.config.experimental: (
        "set_visible_devices",
        "set_virtual_device_configuration",
        "set_memory_growth",
    ),
    tf.config.threading: (
        "set_intra_op_parallelism_threads",
        "set_inter_op_parallelism_threads",
    ),
}


def route_devices(trainer: Trainer, replaced: Replacements) -> None:
    """Let a script's choice of devices and threads have no effect, and say so once: each rank has
    its own already, which the same line on all ranks would undo."""

    @functools.cache
    def say(name: str) -> None:
        if trainer.world.is_root:
            print(
                f"ktrainer run: {name} of the script has no effect: ktrainer gives each rank its "
                "devices and threads (CUDA_VISIBLE_DEVICES=-1 trains on the CPU; ktrainer run "
                "--threads)",
                file=sys.stderr,
                flush=True,
            )

    def ignore(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def configure(*args: Any, **kwargs: Any) -> None:
            say(original.__name__)

        return configure

    for module, names in _DEVICES.items():
        for name in names:
            replaced.wrap(module, name, ignore)


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
