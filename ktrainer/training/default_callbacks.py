"""The callbacks of a run, in their fixed order.

broadcast            equal variables before anything reads them
trace                of `trainer.profile`
learning rate        the base as a batch begins, for the user's own; the rate before the step
metrics              logs of all ranks, before any callback reads logs
watched values       added to the logs of `on_log`, before any callback reads them
the user's own       in the order given, those in code before those in the config
health               loss guard and weight audit, before a checkpoint could keep a bad state
record               before the checkpoint that a killed run resumes from, so that no row is missing
checkpoint           after everything that changes state at this point
throughput, CSV, TensorBoard, trackers, progress    read only
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ktrainer.callbacks.broadcast import BroadcastVariables
from ktrainer.callbacks.callback_list import handles
from ktrainer.callbacks.learning_rate import BaseRateAtBatches, LearningRate
from ktrainer.callbacks.loss_guard import LossGuard
from ktrainer.callbacks.metric_averaging import AverageMetrics
from ktrainer.callbacks.profile import Profile
from ktrainer.callbacks.throughput import Throughput
from ktrainer.callbacks.watch import (
    CommunicationWatch,
    LearningRateWatch,
    MemoryWatch,
    SpeedWatch,
)
from ktrainer.callbacks.watch_norms import NormWatch
from ktrainer.callbacks.weight_audit import Audit
from ktrainer.checkpoint.checkpoint_callback import Checkpoint
from ktrainer.config import callback_registry
from ktrainer.config.watch_checks import TRACKERS
from ktrainer.training.history_log import HistoryLog


def make_callbacks(cfg: Any, user_callbacks: Iterable[Any] = ()) -> list[Any]:
    """All callbacks of a run, on every rank alike; `on_rank` drops the writers of other ranks.

    Args:
        cfg: the resolved configuration.
        user_callbacks: the user's, from code; those in `cfg.callbacks` come after them.
    """
    throughput = Throughput(write=cfg.logging.csv)
    checkpoints = _checkpoints(cfg)
    records = [] if cfg.trainer.fast_dev_run else [HistoryLog()]  # it leaves no files
    trackers = _trackers(cfg, live=not checkpoints) if records else []
    rate = LearningRate(
        scale=cfg.lr.scale,
        warmup=cfg.lr.warmup,
        schedule=cfg.lr.schedule,
        momentum_correction=cfg.lr.momentum_correction,
    )
    others = [*user_callbacks]
    others += [callback_registry.build(spec, allow=cfg.allow) for spec in cfg.callbacks.values()]
    events = ("on_train_batch_begin", "on_batch_begin")
    sets_rates = rate.is_active and any(handles(each, event) for each in others for event in events)
    callbacks = [
        BroadcastVariables(),
        *_profile(cfg),
        rate,
        *([BaseRateAtBatches(rate)] if sets_rates else []),
        AverageMetrics(),
        *_watches(cfg),
        *others,
        *_health(cfg),
        *records,
        *checkpoints,
        throughput,
        *_logs(cfg),
        *trackers,
        *_progress(cfg, throughput, checkpoints),
    ]
    for checkpoint in checkpoints:
        checkpoint.callbacks = callbacks  # it saves the states of all of them
        checkpoint.on_saved = [writer.checkpoint_saved for writer in (*records, *trackers)]
    return callbacks


def _profile(cfg: Any) -> list[Any]:
    profile = cfg.trainer.profile
    if profile.span is None or cfg.trainer.fast_dev_run:  # which leaves no files
        return []
    first, last = profile.span
    return [Profile(first, last, profile.tensorflow)]


def _health(cfg: Any) -> list[Any]:
    health = cfg.health
    found: list[Any] = []
    if health.nan != "ignore" or health.spike is not None:
        limits = (health.spike_window, health.max_skips, health.max_rollbacks)
        found.append(LossGuard(health.nan, health.spike, health.on_spike, *limits))
    if health.audit_every:
        found.append(Audit(every=health.audit_every))
    return found


def _checkpoints(cfg: Any) -> list[Checkpoint]:
    if cfg.checkpoint.every is None and cfg.checkpoint.best is None:
        return []
    return [
        Checkpoint(
            cfg.checkpoint.dir,
            every=cfg.checkpoint.every,
            keep=cfg.checkpoint.keep,
            best=cfg.checkpoint.best,
            mode=cfg.checkpoint.mode,
            allow_nan=cfg.health.nan == "ignore",
            asynchronous=cfg.checkpoint.asynchronous,
            iterators=cfg.checkpoint.iterators,
        )
    ]


def _logs(cfg: Any) -> list[Any]:
    found: list[Any] = []
    if cfg.logging.csv:
        from ktrainer.callbacks.csv_log import CSVLog

        found.append(CSVLog())
    if cfg.logging.tensorboard:
        from ktrainer.callbacks.tensorboard import TensorBoardLog

        found.append(TensorBoardLog())
    return found


def _trackers(cfg: Any, live: bool) -> list[Any]:
    wanted = {name: getattr(cfg.logging, name) for name in TRACKERS}
    if all(arguments is None for arguments in wanted.values()):
        return []
    from ktrainer.callbacks.trackers.tracker import Tracker

    trackers = [
        Tracker(name, arguments, live)
        for name, arguments in wanted.items()
        if arguments is not None
    ]
    for tracker in trackers:
        tracker.others = [other for other in trackers if other is not tracker]
    return trackers


def _watches(cfg: Any) -> list[Any]:
    watch = cfg.watch
    found: list[Any] = []
    if watch.norms is not None:
        found.append(NormWatch(watch.norms, watch.layers))
    if cfg.logging.histograms is not None and cfg.logging.tensorboard:
        from ktrainer.callbacks.tensorboard_histograms import TensorBoardHistograms

        found.append(TensorBoardHistograms(cfg.logging.histograms))
    if watch.learning_rate:
        found.append(LearningRateWatch())
    if watch.speed or watch.tokens is not None or watch.utilization:
        found.append(SpeedWatch(watch.speed, watch.tokens, watch.utilization))
    if watch.memory:
        found.append(MemoryWatch())
    if watch.communication:
        backend = cfg.backend
        found.append(CommunicationWatch(backend.wire, backend.low_rank, backend.sparse_as_dense))
    return found


def _progress(cfg: Any, throughput: Any, checkpoints: list[Checkpoint]) -> list[Any]:
    kind = cfg.logging.progress
    if kind == "none":
        return []
    from ktrainer.callbacks.console import PlainProgress, RichProgress

    rich = kind == "rich" or (kind == "auto" and on_terminal())
    display = RichProgress() if rich else PlainProgress()
    display.throughput = throughput  # for the summary
    display.newest = partial(_newest, checkpoints)
    return [display]


def _newest(checkpoints: Iterable[Checkpoint]) -> Path | None:
    """The newest checkpoint of this run on the disk."""
    found = (checkpoint.latest() for checkpoint in checkpoints)
    return next((entry.path for entry in found if entry is not None), None)


def on_terminal(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the output is a terminal: this process's, or the launcher's, which sets
    KTRAINER_TERMINAL to `1` or `0`."""
    launcher = environ.get("KTRAINER_TERMINAL")
    if launcher in ("0", "1"):
        return launcher == "1"
    # mpirun gives rank 0 a pseudo-terminal, whatever its own output is.
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in environ
