"""Notice at once when training has gone wrong.

`NanStop` uses `on_train_begin` and `on_step_end`; `Audit` uses `on_train_begin`, `on_step_end`,
`on_epoch_end` and `on_restore`. Both act on all ranks at the same step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ktrainer.callbacks.base import Callback, as_floats
from ktrainer.callbacks.variables import model_variables, view_of
from ktrainer.durations import Duration, Every
from ktrainer.errors import DivergenceError
from ktrainer.preflight import audit
from ktrainer.progress import Progress
from ktrainer.step_logs import as_number, flatten_paths
from ktrainer.steps.placement import placement_of
from ktrainer.world import World


def finite_loss(logs: Mapping[str, Any] | None) -> bool:
    """Whether every loss in `logs` is finite; when nothing is called a loss, every scalar."""
    logs = logs or {}
    every = {
        p: n
        for p, v in flatten_paths(logs).items()
        if (n := as_number(v)) is not None and not n.ndim
    }
    losses = {p: v for p, v in every.items() if any(_is_loss(part) for part in p)}
    return all(math.isfinite(value) for value in (losses or every).values())


def _is_loss(key: str | int) -> bool:
    return isinstance(key, str) and "loss" in key and not key.startswith("val_")


class NanStop(Callback):
    """Stop all ranks at the step in which the loss of any of them is not finite.

    It must come before checkpoints, so that none is saved of such a step.

    Args:
        every: how often to look. Looking waits for the step to finish and, with several ranks,
            takes one small message.
        world: the ranks; default: the trainer's, or this process's.

    Attributes:
        stopped_at: the step of the stop; None if there was none.
    """

    def __init__(self, every: str | Duration = "1ba", world: World | None = None) -> None:
        super().__init__()
        self.every = Every(every)
        self._own_world = world
        self.stopped_at: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.stopped_at = None
        self.every.start(self.progress)

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self.every.due(self.progress):
            return
        world = self.world
        bad = not finite_loss(logs)
        if not world.any(bad, "check for a loss that is not finite"):
            return
        self.stopped_at = step
        reason = f"the loss is not finite at step {step}"
        if bad and world.size > 1:
            reason += f" on rank {world.rank}"
        if bad:
            warnings.warn(
                f"{reason}: {as_floats(logs)}. Training stops. Lower the learning rate, clip "
                "gradients (trainer.clip), or look for bad values in the data.",
                stacklevel=2,
            )
        if self.trainer is not None:
            self.trainer.unsound = True  # nothing of this is to be saved
        self.request_stop(reason)


class Audit(Callback):
    """Compare a checksum of every variable between ranks, every so often.

    Of a model in partitions, each partition between its copies.

    Ranks whose weights differ train on, and look healthy; this finds out.

    Args:
        every: how often, for example `"1ep"` or `"1000ba"`.
        world: the ranks; default: the trainer's, or this process's.

    Raises:
        DivergenceError: naming the first variable that differs, and the ranks.
    """

    def __init__(self, every: str | Duration = "1ep", world: World | None = None) -> None:
        super().__init__()
        self.every = Every(every)
        self._own_world = world

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.every.steps_per_epoch = self.steps_per_epoch
        self.every.start(self.progress)

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        self._audit_if_due(epoch_end=False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._audit_if_due(epoch_end=True)

    def on_restore(self, progress: Progress) -> None:
        self.every.start(progress)

    def _audit_if_due(self, epoch_end: bool) -> None:
        world = self.world
        due = self.every.due(self.progress, epoch_end=epoch_end)
        if world.size == 1:
            return
        if self.every.needs_agreement:
            due = bool(world.broadcast(due, 0, "decision to audit"))
        if due:
            arrays = {n: view_of(v) for n, v in model_variables(self.model)}
            placement = placement_of(self.model)
            if placement is None:
                audit(world, arrays)
            else:
                _audit_copies(world, placement.copies, arrays)


def _audit_copies(world: World, copies: World, arrays: Mapping[str, np.ndarray]) -> None:
    """Compare a partition's variables between its copies; what differs stops all ranks."""
    found = None
    try:
        audit(copies, arrays)
    except DivergenceError as error:
        found = str(error)
    texts = [text for text in world.allgather(found, "audit of all partitions") if text]
    if texts:
        raise DivergenceError(texts[0])
