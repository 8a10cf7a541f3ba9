"""Whether training stops, and what of an epoch that leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.preemption import SignalHandlers
    from ktrainer.training.recovery_protocol import Recovery
    from ktrainer.training.slow_watch import SlowWatch
    from ktrainer.training.triggers import Triggers


class StopDecision:
    """Decides when training stops, the same on every rank.

    Args:
        state: of the run.
        triggers: how long to train.
        signals: what asks the process to end.
        recovery: carries the ranks' votes.
        watch: when the ranks' times are to be compared, which the same vote agrees on.

    Attributes:
        compares_times: whether the ranks do so now, by the last vote.
    """

    def __init__(
        self,
        state: TrainState,
        triggers: Triggers,
        signals: SignalHandlers,
        recovery: Recovery,
        watch: SlowWatch,
    ) -> None:
        self._state, self._triggers = state, triggers
        self._signals, self._recovery, self._watch = signals, recovery, watch
        self.compares_times = False

    @property
    def steps_left(self) -> int | None:
        """Updates until `trainer.max_steps`; None without that limit."""
        most = self._triggers.max_steps
        return None if most is None else max(0, most - self._state.progress.step)

    @property
    def is_final(self) -> bool:
        """Whether nothing more is trained."""
        state = self._state
        return (
            state.stopped
            or state.out_of_time
            or state.progress.epoch >= self._triggers.epochs
            or self.steps_left == 0
            or state.feed.exhausted
        )

    @property
    def cuts_epoch(self) -> bool:
        """Whether a stop now leaves some of the epoch."""
        progress = self._state.progress
        taken = progress.batch * self._triggers.accumulate
        return not self._state.feed.is_complete(progress.epoch, taken)

    def vote(self, what: str = "stop") -> bool:
        """Whether any rank asks to stop, or a limit has been met; all ranks call it together.

        Args:
            what: names the operation, should its deadline pass.

        Raises:
            PreemptionRequested: a process was asked to end.
        """
        state, limit = self._state, self._triggers.max_seconds
        late = limit is not None and state.progress.elapsed >= limit
        # Not a stop that a checkpoint should remember: a later run may have more time.
        flags = (bool(state.model.stop_training), late, self._watch.due)
        agreed, request = self._signals.agree(self._recovery.vote, flags, what)
        state.stopped, state.out_of_time, self.compares_times = agreed
        state.model.stop_training = state.stopped
        if not state.stopped:  # maybe a callback has asked for it, and another one called it off
            state.stop_reason = None
        if request is not None:
            raise request
        return state.stopped or state.out_of_time or self.steps_left == 0
