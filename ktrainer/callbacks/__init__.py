"""Callbacks: what happens around the steps, injected by the trainer and usable alone.

Every class here also works in `keras.Model.fit(callbacks=[...])`. Names are imported when they
are first used, so `import ktrainer.callbacks` loads neither Keras nor TensorFlow.

    base.py         the events, in order, and what a callback can ask
    order.py        the callbacks of a run
    broadcast.py    equal variables at the start; variables.py: by which names
    lr.py           scaling, warm-up and schedules of the learning rate, by schedule.py
    metrics.py      logs of all ranks; reduction.py adds up the states
    guard.py        losses gone wrong: stop, skip, roll back
    health.py       NaN ends training; audits of checksums
    throughput.py   examples a second; display.py: as people read it
    progress.py, csv.py, tensorboard.py   only report, as in reporter.py
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
    from ktrainer.callbacks.csv import CSVLog
    from ktrainer.callbacks.guard import LossGuard
    from ktrainer.callbacks.health import Audit, NanStop
    from ktrainer.callbacks.lr import LearningRate
    from ktrainer.callbacks.metrics import AverageMetrics, global_results
    from ktrainer.callbacks.order import assemble
    from ktrainer.callbacks.progress import PlainProgress, RichProgress
    from ktrainer.callbacks.tensorboard import TensorBoardLog
    from ktrainer.callbacks.throughput import Throughput

_HOME = {
    "Audit": "ktrainer.callbacks.health",
    "AverageMetrics": "ktrainer.callbacks.metrics",
    "BroadcastVariables": "ktrainer.callbacks.broadcast",
    "CSVLog": "ktrainer.callbacks.csv",
    "Callback": "ktrainer.callbacks.base",
    "Checkpoint": "ktrainer.checkpoint.callback",
    "LearningRate": "ktrainer.callbacks.lr",
    "LossGuard": "ktrainer.callbacks.guard",
    "NanStop": "ktrainer.callbacks.health",
    "PlainProgress": "ktrainer.callbacks.progress",
    "RichProgress": "ktrainer.callbacks.progress",
    "TensorBoardLog": "ktrainer.callbacks.tensorboard",
    "Throughput": "ktrainer.callbacks.throughput",
    "assemble": "ktrainer.callbacks.order",
    "emit": "ktrainer.callbacks.base",
    "global_results": "ktrainer.callbacks.metrics",
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
    "NanStop",
    "PlainProgress",
    "RichProgress",
    "TensorBoardLog",
    "Throughput",
    "assemble",
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
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
