"""A loss that is not finite, or a spike: stop, skip the update, or roll back.

Events used: `on_train_begin`, `on_epoch_begin`, `on_restore` (read the epoch's metrics) and
`on_step_end` (judge). It comes before checkpoints, so that none is saved of a bad step. All ranks
judge the same numbers: those of the compiled step where updates are skipped (see
`ktrainer.steps.update_guard`), else those of one small message.
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
from ktrainer.distributed import World
from ktrainer.state.durations import Every
from ktrainer.state.nested_logs import as_floats, losses_are_finite
from ktrainer.state.progress import Progress
from ktrainer.steps.update_guard import LossOfStep, UpdateGuard, has_keras_step

GuardAction = Literal["stop", "skip", "rollback", "ignore"]


class LossGuard(Callback):
    """Acts on all ranks at the step in which the loss of any of them goes wrong.

    Alone under `keras.Model.fit`, which has neither our steps nor our checkpoints, it stops where
    it would skip an update or roll back.

    Args:
        nan: action when the loss (or, for `skip`, a gradient) is not finite.
        spike: the factor over the median of the last losses that is a spike; None: none is.
        on_spike: action on a spike.
        window: losses in the median; until there are as many, nothing is a spike.
        max_skips: skipped updates in a row after which training stops.
        max_rollbacks: rollbacks, after which the next one stops training.
        every: updates between two looks at the loss. A look waits for the step to finish and, with
            several ranks, takes one small message.
        world: the ranks; default: the trainer's, or this process's.

    Attributes:
        guard: skips updates in the compiled step; None if no action is `skip`.
        skipped, rollbacks: numbers of skipped updates and of rollbacks.
        stopped_at: the step of the stop; None if there was none.
    """

    def __init__(
        self,
        nan: GuardAction = "stop",
        spike: float | None = None,
        on_spike: GuardAction = "stop",
        window: int = 50,
        max_skips: int = 10,
        max_rollbacks: int = 3,
        every: int = 1,
        world: World | None = None,
    ) -> None:
        super().__init__()
        self.nan, self.spike, self.on_spike = nan, spike, on_spike
        self.max_skips, self.max_rollbacks = max_skips, max_rollbacks
        skips = nan == "skip" or (spike is not None and on_spike == "skip")
        self.guard = UpdateGuard(finite=nan == "skip") if skips else None
        self.losses: deque[float] = deque(maxlen=window)
        self.skipped = self.rollbacks = 0
        self.stopped_at: int | None = None
        self._looked_at = 0  # the last step whose loss was looked at
        self.every = Every(f"{every}ba")
        self._first_judged = (window + 1) * every  # the update whose loss may be a spike
        self._own_world = world
        self._skipped_before = 0  # `guard.skipped` at the last look
        self._since: LossOfStep | None = None

    # -- events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.losses.clear()
        self.skipped = self.rollbacks = 0
        self.stopped_at = None
        self._skipped_before = self._skipped_in_all()
        self._start(self.progress)
        if self.spike is not None:
            self._warn_of_few_updates()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._mark()

    def on_restore(self, progress: Progress) -> None:
        if self.stopped_at is not None and self.stopped_at > progress.step:
            self.stopped_at = None  # that step comes again and is judged again
        self._start(progress)

    def on_step_end(self, step: int, logs: Mapping[str, Any] | None = None) -> None:
        if not self.every.due(self.progress):
            return
        updates, self._looked_at = step - self._looked_at, step
        finite, loss, where = self._observe(logs)
        skipped, in_a_row = self._count_skipped()
        problem = self._problem(finite, loss, in_a_row)
        if skipped:
            self._note_skipped(step, problem, skipped, in_a_row)
        if problem is None:
            if self.spike is not None and not math.isnan(loss):
                self.losses.append(loss)
            self._set_limit()
        elif not (in_a_row and finite) and self.stopped_at != step:
            action = self.on_spike if finite else self.nan
            at = "at" if self._is_first_bad(updates) else "by"
            self._act(action, step, f"{problem} {at} step {step}{where}")

    def _is_first_bad(self, updates: int) -> bool:
        """Return whether no step before was bad: of several since the last look, only the last
        one's loss is known, unless a call ends at the first that is bad."""
        if updates == 1:
            return True
        return self.stops_at_once and self.world.size == 1 and not self.world.heals

    @property
    def _looks_at_all(self) -> bool:
        return str(self.every.duration) == "1ba"

    @property
    def stops_at_once(self) -> bool:
        """Whether it does no more than stop at the first loss that is not finite."""
        return self.nan == "stop" and self.spike is None and self._looks_at_all

    def max_updates_per_call(self) -> int | None:
        return None if self.stops_at_once else 1  # a call ends at such a loss

    def _start(self, progress: Progress) -> None:
        # After a heal an update may be done whose end callbacks have not seen: it is due then.
        self.every.start(progress)
        self._looked_at = progress.step
        self._mark()
        self._set_limit()

    def _guard_in_use(self) -> UpdateGuard | None:
        return self.guard if self.trainer is not None else None

    def _skipped_in_all(self) -> int:
        guard = self._guard_in_use()
        return int(guard.skipped.numpy()) if guard is not None else 0

    def _count_skipped(self) -> tuple[int, int]:
        """(updates skipped since the last look, those in a row up to the last one)."""
        before, self._skipped_before = self._skipped_before, self._skipped_in_all()
        skipped = self._skipped_before - before
        if not skipped:
            return 0, 0
        assert self.guard is not None
        self.progress.counted -= skipped
        return skipped, int(self.guard.skipped_in_a_row.numpy())

    # -- judging a step

    def _mark(self) -> None:
        """Count the losses of the next step from here on."""
        self._since = LossOfStep(self.model) if self.spike is not None else None

    def _observe(self, logs: Mapping[str, Any] | None) -> tuple[bool, float, str]:
        """(whether the losses of all ranks are finite, the mean loss of the step, the ranks whose
        loss is not, as text)."""
        guard = self._guard_in_use()
        if guard is not None and (self.spike is None or has_keras_step(self.model)):
            loss = float(guard.loss.numpy())
            return math.isfinite(loss), loss, ""
        mine = [0.0, 0.0]
        if self._since is not None:
            mine = [float(part) for part in self._since.sums()]
            self._mark()
        finite = self._has_no_rows() or losses_are_finite(logs)
        bad = not (finite and all(map(math.isfinite, mine)))
        local = np.array([bad, *(0.0 if bad else part for part in mine)], np.float64)
        world = self.world
        any_bad, total, count = map(float, world.oob_allreduce(local, "sum", "loss of the step"))
        loss = total / count if count else math.nan  # after a heal the step's sums are gone
        return not any_bad, loss, self._bad_ranks(bad, logs) if any_bad else ""

    def _has_no_rows(self) -> bool:
        """Whether this rank's logs are of padding, of which nothing is counted."""
        state = self.trainer.state if self.trainer is not None else None
        if state is None or not state.program.counts_metrics:
            return False
        return not (state.counted.of_update or state.counted.last)  # after a heal, `last` alone

    def _bad_ranks(self, bad: bool, logs: Mapping[str, Any] | None) -> str:
        world = self.world
        found = world.allgather(as_floats(logs) if bad else None, "losses that are not finite")
        if world.size == 1:
            return f" ({found[0]})"
        texts = [
            f"rank {rank} ({values})" for rank, values in enumerate(found) if values is not None
        ]
        return f" on {', '.join(texts)}"

    def _problem(self, finite: bool, loss: float, in_a_row: int) -> str | None:
        """Describe the fault of the step; None if it has none."""
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

    def _warn_of_few_updates(self) -> None:
        """Warn if this fit ends before any loss can be a spike, as far as its length is known."""
        settings = self.trainer.config.trainer if self.trainer is not None else None
        if settings is not None and settings.fast_dev_run:  # such a run is short in everything
            return
        steps, epochs = self.steps_per_epoch, (self.params or {}).get("epochs")
        ends = [steps * epochs if steps and epochs else None, settings and settings.max_steps]
        updates = min(filter(None, ends), default=math.inf) - self.progress.step
        if updates < self._first_judged:
            self._warn(
                f"health.spike has no effect: this fit has {updates} updates, and none before the "
                f"{self._first_judged}th can be a spike. Set health.spike_window lower."
            )

    # -- actions

    def _note_skipped(self, step: int, problem: str | None, skipped: int, in_a_row: int) -> None:
        self.skipped += skipped
        if skipped == 1 and in_a_row:
            text = f"{problem} at step {step}: the update was skipped"
        else:  # of several updates in a call, only the last one's loss is known
            some = "1 update was" if skipped == 1 else f"{skipped} updates were"
            text = f"{problem or 'a loss was bad'} by step {step}: {some} skipped"
        if in_a_row >= self.max_skips:
            self._stop(step, f"{text}, as were {in_a_row} in a row (health.max_skips)")
        else:
            self._warn(text)

    def _act(self, action: GuardAction, step: int, text: str) -> None:
        if action == "stop" or (action != "ignore" and self.trainer is None):
            self._stop(step, text)
        elif action == "rollback" and self.rollbacks >= self.max_rollbacks:
            self._stop(step, f"{text}, after {self.rollbacks} rollbacks (health.max_rollbacks)")
        elif action == "rollback":
            self.rollbacks += 1
            self.train_state.request_rollback(text)

    def _stop(self, step: int, text: str) -> None:
        self.stopped_at = step
        self.train_state.update_invalid = True  # nothing of this is to be saved
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
            **self._state_of_guard(),
        }

    def _state_of_guard(self) -> dict[str, Any]:
        """The state of the update guard."""
        if self.guard is None:
            return {"in_a_row": 0}
        loss = float(self.guard.loss.numpy())
        return {
            "in_a_row": int(self.guard.skipped_in_a_row.numpy()),
            "loss": loss if math.isfinite(loss) else str(loss),
            "skipped_since_look": self._skipped_in_all() - self._skipped_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.trainer is not None and self.train_state.rollback is not None:
            return  # a rollback: losses and counts since the checkpoint are kept
        self.losses.clear()
        self.losses.extend(state.get("losses", []))
        self.skipped, self.rollbacks = state.get("skipped", 0), state.get("rollbacks", 0)
        if self.guard is not None:
            self.guard.skipped_in_a_row.assign(state.get("in_a_row", 0))
            self.guard.loss.assign(float(state.get("loss", 0.0)))
            self.guard.skipped.assign(state.get("skipped_since_look", 0))
            self._skipped_before = 0
