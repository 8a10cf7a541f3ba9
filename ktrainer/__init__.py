"""ktrainer: train any Keras 3 model on one process or many, and get the same numbers.

Names are imported when first used, so that `import ktrainer` itself loads no TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktrainer.quiet import quiet_tensorflow

__version__ = "0.1.0"

_WHERE = {
    "Trainer": "ktrainer.trainer",
    "Config": "ktrainer.config",
    "load_config": "ktrainer.config",
    "Callback": "ktrainer.callbacks",
    "rank_zero_only": "ktrainer.callbacks",
    "barrier": "ktrainer.world",
    "partition": "ktrainer.backends.pipeline.manual",
    "all_gather": "ktrainer.steps.all_gather",
    "register": "ktrainer.registry",
    "KtrainerError": "ktrainer.errors",
    "ConfigError": "ktrainer.errors",
    "DataError": "ktrainer.errors",
    "ModelError": "ktrainer.errors",
    "WorldError": "ktrainer.errors",
    "DeadlineExceeded": "ktrainer.errors",
    "PeerLost": "ktrainer.errors",
    "RanksDied": "ktrainer.errors",
    "DivergenceError": "ktrainer.errors",
    "CheckpointError": "ktrainer.errors",
    "Interrupted": "ktrainer.errors",
    "SetupError": "ktrainer.errors",
}

__all__ = [
    "Callback",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DeadlineExceeded",
    "DivergenceError",
    "Interrupted",
    "KtrainerError",
    "ModelError",
    "PeerLost",
    "RanksDied",
    "SetupError",
    "Trainer",
    "WorldError",
    "__version__",
    "all_gather",
    "barrier",
    "load_config",
    "partition",
    "rank_zero_only",
    "register",
]

if TYPE_CHECKING:
    from ktrainer.backends.pipeline.manual import partition
    from ktrainer.callbacks import Callback, rank_zero_only
    from ktrainer.config import Config, load_config
    from ktrainer.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DeadlineExceeded,
        DivergenceError,
        Interrupted,
        KtrainerError,
        ModelError,
        PeerLost,
        RanksDied,
        SetupError,
        WorldError,
    )
    from ktrainer.registry import register
    from ktrainer.steps.all_gather import all_gather
    from ktrainer.trainer import Trainer
    from ktrainer.world import barrier

quiet_tensorflow()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ktrainer' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
