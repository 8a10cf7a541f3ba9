"""Callbacks around the steps, added by the trainer and usable alone.

Every class here also works in `keras.Model.fit(callbacks=[...])`, without `on_gradients` and
rollbacks. Names are imported when they are first used, so `import ktrainer.callbacks` loads neither
Keras nor TensorFlow.

    base.py                the base class, with events beyond Keras' own
    broadcast.py           equal variables at the start
    learning_rate.py       scaling, warm-up and schedules, by lr_schedules.py
    metric_averaging.py    logs of all ranks under plain Keras
    loss_guard.py          on a loss that is not finite, or a spike: stop, skip, roll back
    weight_audit.py        checksums of the weights on all ranks
    throughput.py          examples per second
    watch.py, watch_norms.py   learning rate, speed, memory, sent bytes and norms in rows of logs;
                           watch_variables.py measures gradients and weights
    console.py, csv_log.py, tensorboard.py   reports, by reporter.py; console_text.py: their words;
                           tensorboard_histograms.py
    trackers/              Weights & Biases, MLflow, Trackio

The callbacks of a run, in their order: `ktrainer.training.default_callbacks`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktrainer.callbacks.base import (
        Callback,
        emit,
        gradient_hooks,
        is_writer,
        on_rank,
        rank_zero_only,
    )
    from ktrainer.callbacks.broadcast import BroadcastVariables
    from ktrainer.callbacks.console import PlainProgress, RichProgress
    from ktrainer.callbacks.csv_log import CSVLog
    from ktrainer.callbacks.learning_rate import LearningRate
    from ktrainer.callbacks.loss_guard import LossGuard
    from ktrainer.callbacks.metric_averaging import AverageMetrics
    from ktrainer.callbacks.tensorboard import TensorBoardLog
    from ktrainer.callbacks.throughput import Throughput
    from ktrainer.callbacks.weight_audit import Audit
    from ktrainer.steps.metric_reduction import global_results

_HOME = {
    "Audit": "ktrainer.callbacks.weight_audit",
    "AverageMetrics": "ktrainer.callbacks.metric_averaging",
    "BroadcastVariables": "ktrainer.callbacks.broadcast",
    "CSVLog": "ktrainer.callbacks.csv_log",
    "Callback": "ktrainer.callbacks.base",
    "Checkpoint": "ktrainer.checkpoint.checkpoint_callback",
    "LearningRate": "ktrainer.callbacks.learning_rate",
    "LossGuard": "ktrainer.callbacks.loss_guard",
    "PlainProgress": "ktrainer.callbacks.console",
    "RichProgress": "ktrainer.callbacks.console",
    "TensorBoardLog": "ktrainer.callbacks.tensorboard",
    "Throughput": "ktrainer.callbacks.throughput",
    "emit": "ktrainer.callbacks.base",
    "global_results": "ktrainer.steps.metric_reduction",
    "gradient_hooks": "ktrainer.callbacks.base",
    "is_writer": "ktrainer.callbacks.base",
    "on_rank": "ktrainer.callbacks.base",
    "rank_zero_only": "ktrainer.callbacks.base",
}

__all__ = [
    "Audit",
    "AverageMetrics",
    "BroadcastVariables",
    "CSVLog",
    "Callback",
    "Checkpoint",
    "LearningRate",
    "LossGuard",
    "PlainProgress",
    "RichProgress",
    "TensorBoardLog",
    "Throughput",
    "emit",
    "global_results",
    "gradient_hooks",
    "is_writer",
    "on_rank",
    "rank_zero_only",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("keras")  # before a module that needs it: see `ktrainer.__getattr__`
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
