"""The state of one run: trainer, loop, evaluation, callbacks and recovery share one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ktrainer.errors import name_ranks
from ktrainer.state.metric_counts import MetricCounts
from ktrainer.state.progress import Progress
from ktrainer.state.slowness import Slow
from ktrainer.state.time_shares import TimeShares
from ktrainer.state.warning_log import WarningLog


@dataclass(frozen=True)
class Healed:
    """One change of the ranks.

    Attributes:
        step: the last update that counts; the next is done by the new set of ranks.
        lost: the lost ranks, numbered as before the change.
        size: number of ranks after it.
        seconds: from the moment this rank noticed, until it resumed training.
        joined: whether a rank has joined, and none was reported as lost.
    """

    step: int
    lost: tuple[int, ...]
    size: int
    seconds: float
    joined: bool

    @property
    def what(self) -> str:
        """`rank 1 was lost`, `a rank joined`, or `no rank was lost` where the ranks that were
        reported have answered since, or one that was to join was lost."""
        if not self.lost:
            return "a rank joined" if self.joined else "no rank was lost"
        return f"{name_ranks(self.lost)} {'was' if len(self.lost) == 1 else 'were'} lost"


@dataclass(eq=False)
class TrainState:
    """All that one `fit` is, and what its checkpoints are made from.

    A checkpoint holds the variables of `model`, `progress`, `counted`, the position of `feed`, and
    the states of callbacks. The rest lasts as long as the call.

    Attributes:
        model: the model of the `fit` that runs, or else of the last call.
        program: its compiled steps; None before the first `fit`.
        feed: this rank's batches of the training data; None before the first `fit`.
        validation: those of the validation data, if there are any.
        progress: counters, the same on every rank.
        counted: this rank's weight in the logs of the epoch so far.
        times: this rank's time so far, by what it was spent on.
        slow: what has been named as slow.
        warnings: those of this rank that are not yet recorded; on rank 0 also those of others.
        steps_per_epoch: updates an epoch; None when unknown.
        differences: lines that say what cannot equal one process, or `Model.fit`.
        differences_said: those that were printed where there is no display, in all fits.
        epoch_complete: in `on_epoch_end`, whether the epoch was not cut short by a stop.
        data_facts: facts of the data by which two runs can be compared.
        call_facts: facts by which a `fit` is told from the script's others.
        first_batch: digests of the first batch, until they are recorded.
        end: how the run has ended, and why; see `ktrainer.training.run_facts.end_facts`.
        log_due: whether a callback wants logs after this update; on all ranks alike.
        stop_reason: why a callback has asked for the end of training; None if none has.
        stopped: whether the ranks have agreed to stop, as a callback of any of them has set
            `model.stop_training`; that attribute alone is one rank's wish.
        out_of_time: whether `trainer.max_time` has passed, on any rank.
        update_invalid: whether the last update has spoilt the model, as far as `health` can tell:
            no checkpoint of it is saved.
        rollback: why the run is to return to the last checkpoint; None if it is not.
        fits: how often `fit` has begun to train; one that is refused before does not count, nor
            does one that a callback has called.
        inside: the number of this `fit` among those that callbacks of another have called; 0 for
            one that no callback has called.
        nested: how many calls of `fit` callbacks have made.
        running: whether `fit` is being executed.
        joining: whether this process is about to join ranks that train already.
        healed: changes of the ranks since the Trainer was made.
    """

    model: Any = None
    program: Any = None
    feed: Any = None
    validation: Any = None
    progress: Progress = field(default_factory=Progress)
    counted: MetricCounts = field(default_factory=MetricCounts)
    times: TimeShares = field(default_factory=TimeShares)
    slow: list[Slow] = field(default_factory=list)
    warnings: WarningLog = field(default_factory=WarningLog)
    steps_per_epoch: int | None = None
    differences: tuple[str, ...] = ()
    differences_said: set[str] = field(default_factory=set)
    data_facts: dict[str, str] = field(default_factory=dict)
    call_facts: dict[str, str] = field(default_factory=dict)
    first_batch: dict[str, str] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    epoch_complete: bool = True
    log_due: bool = False
    stop_reason: str | None = None
    stopped: bool = False
    out_of_time: bool = False
    update_invalid: bool = False
    rollback: str | None = None
    fits: int = 0
    inside: int = 0
    nested: int = 0
    running: bool = False
    joining: bool = False
    healed: list[Healed] = field(default_factory=list)

    def next_fit(self, began: float) -> TrainState:
        """The state of a `fit` that begins now, in a callback if another one is running.

        Args:
            began: the moment from which on its time is counted.
        """
        inside = self.nested + 1 if self.running else 0
        return TrainState(
            model=self.model,
            fits=self.fits,
            inside=inside,
            nested=inside,
            running=True,
            times=TimeShares(began),
            joining=self.joining,
            healed=self.healed,
            differences_said=self.differences_said,
        )

    def request_stop(self, reason: str) -> None:
        """End training after the current update, on all ranks."""
        self.stop_reason = reason
        if self.model is not None:
            self.model.stop_training = True

    def request_rollback(self, reason: str) -> None:
        """Return to the last checkpoint after the current update. Call it on all ranks alike."""
        self.rollback, self.update_invalid = reason, True
