"""The callback of a trial of a sweep.

Events used: `on_validation_end` and `on_epoch_end` (report the metric, ask whether to stop),
`on_restore` (stop again), `close` (end the script of a pruned trial).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktrainer.callbacks.base import Callback
from ktrainer.checkpoint.checkpoint_callback import Checkpoint
from ktrainer.state.progress import Progress
from ktrainer.tuning.sweep_trial import (
    PRUNED,
    SweepTrial,
    current_sweep_trial,
    metric_of,
    refuse,
)

if TYPE_CHECKING:
    from ktrainer.tuning.sweep_study import TrialReports


class TrialPruned(SystemExit):
    """Ends the script of a pruned trial, once its fit has ended."""

    def __init__(self) -> None:
        super().__init__(0)


def add_sweep_reports(callbacks: list[Any]) -> None:
    """Add the callback of the trial that this process belongs to, if any, before checkpoints, which
    keep its state."""
    trial = current_sweep_trial()
    if trial is None:
        return
    places = (k for k, callback in enumerate(callbacks) if isinstance(callback, Checkpoint))
    callbacks.insert(next(places, len(callbacks)), SweepReports(trial))


class SweepReports(Callback):
    """Reports each value of the metric to the study, and stops all ranks where its pruner says so.

    Rank 0 asks; the others are told, so that all stop after the same step. Only the script's first
    `fit` is reported: values of a later one are of other steps. A metric that is not finite stops
    training too.

    A storage that does not answer is warned of, and the trial continues unpruned.
    """

    def __init__(self, trial: SweepTrial) -> None:
        super().__init__()
        self.trial = trial
        self.count = 0  # values so far: Optuna's step
        self.reported_at = -1  # the update
        self._study: TrialReports | None = None
        self._failed = self._pruned = False

    def set_trainer(self, trainer: Any) -> None:
        super().set_trainer(trainer)
        state = self.train_state
        if self.world.is_root and self.trial.pruner != "none" and not (state.fits or state.inside):
            self._ask(None)  # importing Optuna takes a second, which is no part of the first epoch

    def on_validation_end(self, step: int, logs: Mapping[str, float]) -> None:
        self._report(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._report(logs or {})
        self._check_metric(logs or {})

    @property
    def _metric(self) -> str:
        return metric_of(self.trial.metric, self.train_state.validation is not None)

    def _check_metric(self, logs: Mapping[str, Any]) -> None:
        """Refuse a metric that no epoch of the script's only `fit` will have."""
        validates = self.train_state.validation is not None
        complete = not validates or any(name.startswith("val_") for name in logs)
        if self.trial.metric is None or self.count or not complete or self._is_later:
            return
        known = ", ".join(sorted(logs))
        refuse(f"the script has no metric {self._metric!r}, as --metric says; it has {known}.")

    @property
    def _is_later(self) -> bool:
        """Whether this is not the script's first `fit`."""
        return self.train_state.fits > 1 or bool(self.train_state.inside)

    def _report(self, logs: Mapping[str, Any]) -> None:
        state, metric = self.train_state, self._metric
        if metric not in logs or self._is_later:
            return
        if state.progress.step == self.reported_at:
            return  # an epoch that ends with a validation inside of it
        self.count, self.reported_at = self.count + 1, state.progress.step
        value = float(logs[metric])
        if not math.isfinite(value):
            self.request_stop(f"{metric} is {value}")
        elif self.trial.pruner != "none":
            asked = self.world.is_root and self._ask(value)
            self._pruned = bool(self.world.broadcast(asked, what="prune the trial"))
            if self._pruned:
                self.request_stop(PRUNED)

    def _ask(self, value: float | None) -> bool:
        """Report a value; return whether the trial is to be pruned. None: only open the study."""
        from ktrainer.tuning.sweep_study import TrialReports

        try:
            if self._study is None:
                self._study = TrialReports(self.trial)
            return value is not None and self._study.report(self.count, value)
        except Exception as error:  # of Optuna, or of its database's driver
            if not self._failed:
                self._failed = True  # first, as a warning may be an error
                warnings.warn(
                    f"the storage of the sweep does not answer ({type(error).__name__}: {error}). "
                    "The trial continues, and is not pruned.",
                    stacklevel=2,
                )
            return False

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "reported_at": self.reported_at, "pruned": self._pruned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.reported_at = state["count"], state["reported_at"]
        self._pruned = state["pruned"]

    def on_restore(self, progress: Progress) -> None:
        if self._pruned:  # and killed before that was recorded in the study
            self.request_stop(PRUNED)

    def close(self) -> None:
        """End the script of a pruned trial.

        Raises:
            TrialPruned: on all ranks, unless an error has ended the fit.
        """
        self._study = None
        pruned, self._pruned = self._pruned, False
        if pruned and self.train_state.end.get("reason") == "finished":
            raise TrialPruned
