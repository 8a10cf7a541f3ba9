"""A loss that is not finite, or far above what it was: stop, leave the update out, or go back.

Events used: `on_train_begin`, `on_epoch_begin`, `on_restore` (where the epoch's metrics stand) and
`on_step_end` (judge). It comes before checkpoints, and all ranks judge the same numbers: those of
the compiled step where updates are left out (see `ktrainer.steps.guard`), else those of one small
message in the place of `NanStop`'s.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

import numpy as np

from ktrainer.callbacks.base import Callback
from ktrainer.callbacks.health import finite_loss
from ktrainer.progress import Progress
from ktrainer.steps.guard import Guard, LossOfStep, has_keras_step

Action = Literal["stop", "skip", "rollback", "ignore"]


class LossGuard(Callback):
    """Acts on all ranks at the step in which the loss goes wrong.

    Alone under `keras.Model.fit`, which has neither our steps nor our checkpoints, it stops where
    it would leave an update out or go back.

    Args:
        nan: what to do when the loss (or, for `skip`, a gradient) is not finite.
        spike: the factor over the median of the last losses that is a spike; None: none is.
        on_spike: what to do then.
        window: losses that the median is of; before there are as many, nothing is a spike.
        max_skips: updates left out in a row after which training stops.
        max_rollbacks: times that the run goes back; the next time it stops.

    Attributes:
        guard: what leaves updates out, for the compiled step; None if nothing does.
        skipped, rollbacks: how often it has done so.
    """

    def __init__(
        self,
        nan: Action = "stop",
        spike: float | None = None,
        on_spike: Action = "stop",
        window: int = 50,
        max_skips: int = 10,
        max_rollbacks: int = 3,
    ) -> None:
        super().__init__()
        self.nan, self.spike, self.on_spike = nan, spike, on_spike
        self.max_skips, self.max_rollbacks = max_skips, max_rollbacks
        skips = nan == "skip" or (spike is not None and on_spike == "skip")
        self.guard = Guard(finite=nan == "skip") if skips else None
        self.losses: deque[float] = deque(maxlen=window)
        self.skipped = self.rollbacks = 0

    # -- events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.losses.clear()
        self.skipped = self.rollbacks = 0
        self._left_out_before = self._left_out_in_all()
        self._mark()
        self._set_limit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._mark()

    def on_restore(self, progress: Progress) -> None:
        self._mark()
        self._set_limit()

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        finite, loss = self._observe(logs)
        left_out, in_a_row = self._count_left_out()
        what = self._what(finite, loss, in_a_row)
        if left_out:
            self._left_out(step, what, left_out, in_a_row)
        if what is None:
            self.losses.append(loss)
            self._set_limit()
        elif not in_a_row:
            action = self.on_spike if finite else self.nan
            self._act(action, f"{what} at step {step}")

    def _guard_in_use(self) -> Guard | None:
        return self.guard if self.trainer is not None else None

    def _left_out_in_all(self) -> int:
        guard = self._guard_in_use()
        return int(guard.left_out.numpy()) if guard is not None else 0

    def _count_left_out(self) -> tuple[int, int]:
        """(updates of the last call that were left out, those in a row up to the last one)."""
        before, self._left_out_before = self._left_out_before, self._left_out_in_all()
        left_out = self._left_out_before - before
        if not left_out:
            return 0, 0
        assert self.guard is not None
        self.progress.counted -= left_out
        return left_out, int(self.guard.skipped.numpy())

    # -- what it is

    def _mark(self) -> None:
        """Count the losses of the next step from here on."""
        self._since = LossOfStep(self.model)

    def _observe(self, logs: Mapping[str, Any] | None) -> tuple[bool, float]:
        """(whether the losses of all ranks are finite, the mean loss of the step)."""
        guard = self._guard_in_use()
        if guard is not None and (self.spike is None or has_keras_step(self.model)):
            loss = float(guard.loss.numpy())
            return math.isfinite(loss), loss
        mine = [0.0, 0.0]
        if self.spike is not None:
            mine = [float(part) for part in self._since.sums()]
            self._mark()
        bad = float(not (finite_loss(logs) and all(map(math.isfinite, mine))))
        local = np.array([bad, *(0.0 if bad else part for part in mine)])
        bad, total, count = map(float, self.world.oob_allreduce(local, "sum", "loss of the step"))
        return not bad, total / count if count else 0.0

    def _what(self, finite: bool, loss: float, in_a_row: int) -> str | None:
        """What is wrong with the step; None if nothing is."""
        if not finite:
            return "the loss is not finite"
        if loss > self._limit():
            return f"the loss is {loss:.4g}, the median before {median(self.losses):.4g},"
        return "a gradient is not finite" if in_a_row else None

    def _limit(self) -> float:
        """The highest loss that is no spike."""
        if self.spike is None or len(self.losses) < (self.losses.maxlen or 0):
            return math.inf
        usual = median(self.losses)
        return self.spike * usual if usual > 0 else math.inf

    def _set_limit(self) -> None:
        if self.guard is not None and self.on_spike == "skip":
            self.guard.limit.assign(self._limit())

    # -- what is done

    def _left_out(self, step: int, what: str | None, left_out: int, in_a_row: int) -> None:
        self.skipped += left_out
        if left_out == 1 and in_a_row:
            text = f"{what} at step {step}: the update was left out"
        else:  # of several updates in a call, only the last one's loss is known
            some = "1 update was" if left_out == 1 else f"{left_out} updates were"
            text = f"{what or 'a loss was bad'} by step {step}: {some} left out"
        if in_a_row >= self.max_skips:
            self._stop(f"{text}, as were {in_a_row} in a row (health.max_skips)")
        else:
            self._warn(text)

    def _act(self, action: Action, text: str) -> None:
        if action == "stop" or (action != "ignore" and self.trainer is None):
            self._stop(text)
        elif action == "rollback" and self.rollbacks >= self.max_rollbacks:
            self._stop(f"{text}, after {self.rollbacks} rollbacks (health.max_rollbacks)")
        elif action == "rollback":
            self.rollbacks += 1
            self.trainer.request_rollback(text)

    def _stop(self, text: str) -> None:
        if self.trainer is not None:
            self.trainer.unsound = True  # nothing of this is to be saved
        self._warn(
            f"{text}. Training stops. Lower the learning rate, clip gradients (trainer.clip), or "
            "look for bad values in the data."
        )
        self.request_stop(text)

    def _warn(self, text: str) -> None:
        if self.world.is_root:
            warnings.warn(text, stacklevel=4)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
            "in_a_row": int(self.guard.skipped.numpy()) if self.guard is not None else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.unsound:
            return  # a rollback: what was seen since stays seen
        self.losses.clear()
        self.losses.extend(state.get("losses", []))
        self.skipped, self.rollbacks = state.get("skipped", 0), state.get("rollbacks", 0)
        if self.guard is not None:
            self.guard.skipped.assign(state.get("in_a_row", 0))
