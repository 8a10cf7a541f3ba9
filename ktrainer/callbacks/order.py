"""The callbacks of a run, in their fixed order.

broadcast            equal variables before anything reads them
learning rate        set before the step
metrics              logs of all ranks, before anyone reads logs
the user's own       in the order given, those in code before those in the config
health               a loss gone wrong, before a checkpoint could keep it
checkpoint           after everything that changes state at this point
throughput, CSV, TensorBoard, progress              only look
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ktrainer.world import World


def assemble(cfg: Any, world: World, user_callbacks: Iterable[Any] = ()) -> list[Any]:
    """All callbacks of a run, on every rank alike; `on_rank` leaves out the writers elsewhere.

    Args:
        cfg: the resolved configuration.
        world: the ranks.
        user_callbacks: the user's, from code; those in `cfg.callbacks` come after them.
    """
    from ktrainer.callbacks.broadcast import BroadcastVariables
    from ktrainer.callbacks.lr import LearningRate
    from ktrainer.callbacks.metrics import AverageMetrics
    from ktrainer.callbacks.throughput import Throughput

    throughput = Throughput(write=cfg.logging.csv)
    checkpoint = _checkpoint(cfg)
    rate = LearningRate(
        scale=cfg.lr.scale,
        warmup=cfg.lr.warmup,
        schedule=cfg.lr.schedule,
        momentum_correction=cfg.lr.momentum_correction,
    )
    callbacks = [
        BroadcastVariables(),
        rate,
        AverageMetrics(),
        *user_callbacks,
        *_configured(cfg),
        *_health(cfg),
        *checkpoint,
        throughput,
        *_logs(cfg),
        *_progress(cfg, throughput),
    ]
    for saver in checkpoint:
        saver.callbacks = callbacks  # it keeps the states of all of them
    return callbacks


def _configured(cfg: Any) -> list[Any]:
    if not cfg.callbacks:
        return []
    from ktrainer.registry import build

    return [build(spec, allow=cfg.allow) for spec in dict(cfg.callbacks).values()]


def _health(cfg: Any) -> list[Any]:
    from ktrainer.callbacks.guard import LossGuard
    from ktrainer.callbacks.health import Audit, NanStop

    health = cfg.health
    found: list[Any] = [NanStop()] if health.nan == "stop" and health.spike is None else []
    if health.nan in ("skip", "rollback") or health.spike is not None:
        limits = (health.spike_window, health.max_skips, health.max_rollbacks)
        found.append(LossGuard(health.nan, health.spike, health.on_spike, *limits))
    if cfg.health.audit_every:
        found.append(Audit(every=cfg.health.audit_every))
    return found


def _checkpoint(cfg: Any) -> list[Any]:
    if cfg.checkpoint.every is None and cfg.checkpoint.best is None:
        return []
    from ktrainer.callbacks import Checkpoint  # lives above this package, with the format

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
        from ktrainer.callbacks.csv import CSVLog

        found.append(CSVLog())
    if cfg.logging.tensorboard:
        from ktrainer.callbacks.tensorboard import TensorBoardLog

        found.append(TensorBoardLog())
    return found


def _progress(cfg: Any, throughput: Any) -> list[Any]:
    kind = cfg.logging.progress
    if kind == "none":
        return []
    from ktrainer.callbacks.progress import PlainProgress, RichProgress

    rich = kind == "rich" or (kind == "auto" and on_terminal())
    display = RichProgress() if rich else PlainProgress()
    display.throughput = throughput  # for the summary
    return [display]


def on_terminal(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the screen is a terminal: ours, or the launcher's, which says so in
    KTRAINER_TERMINAL (`1`, or `0` to deny)."""
    told = environ.get("KTRAINER_TERMINAL")
    if told in ("0", "1"):
        return told == "1"
    # mpirun gives rank 0 a pseudo-terminal, whatever its own output is.
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in environ
