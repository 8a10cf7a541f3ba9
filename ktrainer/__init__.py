"""ktrainer: train any Keras 3 model on one process or many, and get the same numbers.

Names are imported when first used, so that `import ktrainer` itself loads no TensorFlow.

trainer.py    the facade                  errors.py    what is raised
training/     a run: loops, evaluation    state/       the state of a run, as data
steps/        Keras' steps, compiled      data/        local batches of the user's data
backends/     pipeline, tf_distribute..   distributed/ ranks, collectives, sums of gradients
callbacks/    around the steps            checkpoint/  saving and resuming
elastic/      when ranks are lost         launch/, cli/   `ktrainer run` and its siblings
config/       keys and their checks       plan/        what a configuration means here
script/       scripts without a Trainer   verify/      split against unsplit updates
plan_report/  `ktrainer plan`             runtime/     devices, folders, Keras' versions
dataparallel/ gradients over ranks in custom loops, as in Horovod
modelparallel/ models in stages in custom loops, as in SageMaker's library
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ktrainer.runtime.garbage_collection import paused_collection
from ktrainer.runtime.tensorflow_logging import quiet_tensorflow

__version__ = "0.1.0"

_WHERE = {
    "Trainer": "ktrainer.trainer",
    "Config": "ktrainer.config",
    "load_config": "ktrainer.config",
    "Callback": "ktrainer.callbacks",
    "rank_zero_only": "ktrainer.callbacks",
    "barrier": "ktrainer.distributed",
    "partition": "ktrainer.backends.pipeline.graph.stage_scopes",
    "all_gather": "ktrainer.steps.all_gather",
    "register": "ktrainer.config.callback_registry",
    "KtrainerError": "ktrainer.errors",
    "ConfigError": "ktrainer.errors",
    "DataError": "ktrainer.errors",
    "ModelError": "ktrainer.errors",
    "WorldError": "ktrainer.errors",
    "DeadlineExceeded": "ktrainer.errors",
    "PeerLost": "ktrainer.errors",
    "RanksLost": "ktrainer.errors",
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
    "RanksLost",
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
    from ktrainer.backends.pipeline.graph.stage_scopes import partition
    from ktrainer.callbacks import Callback, rank_zero_only
    from ktrainer.config import Config, load_config
    from ktrainer.config.callback_registry import register
    from ktrainer.distributed import barrier
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
        RanksLost,
        SetupError,
        WorldError,
    )
    from ktrainer.steps.all_gather import all_gather
    from ktrainer.trainer import Trainer

quiet_tensorflow()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ktrainer' has no attribute {name!r}")
    with nullcontext() if _WHERE[name] in sys.modules else paused_collection():
        return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
