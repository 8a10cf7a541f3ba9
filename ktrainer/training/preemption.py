"""Preemption by a person, Slurm or Kubernetes: finish the step, save a checkpoint, exit.

    a signal, on any rank       a handler in the main thread notes it, and does nothing else
    the end of the step         the ranks vote on it, with what they vote on anyway
    all ranks                   save, if enough of the grace period remains; on_train_end, on_times
    `Interrupted`               ends the program with exit code 75, and says how to resume

A second signal does what the first would have done without ktrainer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np

from ktrainer.checkpoint.checkpoint_callback import Checkpoint
from ktrainer.data.prefetch_thread import checked_waits
from ktrainer.errors import Interrupted, InterruptedByKeyboard
from ktrainer.training.resume import words_to_resume

if TYPE_CHECKING:
    from ktrainer.config import InterruptConfig
    from ktrainer.state.train_state import TrainState
    from ktrainer.training.context import RunContext

# One request may come twice: from the job manager, and passed on by what it has started.
_SAME_SECONDS = 1.0
_TO_END_SECONDS = 3.0  # at most: for callbacks and the interpreter, after a last checkpoint
LAUNCHED = "KTRAINER_LAUNCHED"  # set where the launcher says it


class PreemptionRequested(Exception):
    """One of the ranks was asked to end, and all of them know it.

    Args:
        number: of the signal.
        seconds: how long ago the first of them was asked.
    """

    def __init__(self, number: int, seconds: float) -> None:
        self.number, self._at = number, time.monotonic() - seconds
        super().__init__(number, seconds)

    @property
    def seconds(self) -> float:
        """How long ago the first of them was asked, by now."""
        return time.monotonic() - self._at


class SignalHandlers:
    """Note the signals that ask this process to end.

    Args:
        config: which signals, and how long there is until the process is killed.
    """

    def __init__(self, config: InterruptConfig) -> None:
        self.config = config
        self._number = 0
        self._at = 0.0
        self._before: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Note signals inside the block. Those that were not handled are re-raised on exit.

        Handlers belong to the main thread; elsewhere, and for signals that are ignored or
        handled outside of Python, nothing changes.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.Signals[name] for name in self.config.signals):
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        try:
            yield
        except GeneratorExit:  # `break` in a loop of the user's own
            self._restore_and_resend()
            raise
        except BaseException:
            self._restore()
            raise
        self._restore_and_resend()

    def _restore_and_resend(self) -> None:
        """Restore the handlers; send the noted signal, if any, to this process again."""
        self._restore()
        if self._number:
            os.kill(os.getpid(), self._number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._number:
            self._number, self._at = number, now
        elif now - self._at > _SAME_SECONDS:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def flags(self) -> tuple[int, int]:
        """For the ranks to take the maximum of: the signal, and milliseconds since it came."""
        return self._number, int(1000 * (time.monotonic() - self._at)) if self._number else 0

    def agree(
        self,
        vote: Callable[[np.ndarray, str], np.ndarray],
        flags: tuple[bool, ...],
        what: str,
    ) -> tuple[tuple[bool, ...], PreemptionRequested | None]:
        """Combine flags and signals of all ranks, in one message.

        Returns:
            For each flag, whether any rank has it; and the request to end, None if no rank got a
            signal. It is not raised here, so that callers record the flags first.

        Args:
            vote: the maximum over ranks of each of some int32 numbers.
            flags: this rank's.
            what: names the operation, should its deadline pass.
        """
        mine = np.array([*flags, *self.flags()], np.int32)
        *agreed, number, milliseconds = map(int, vote(mine, what))
        request = PreemptionRequested(number, milliseconds / 1000) if number else None
        return tuple(map(bool, agreed)), request

    def wait_for_data(self, take: Callable[[], Any], alone: bool) -> Any:
        """`take()`, which waits for data, and calls `check_wait` before.

        Args:
            alone: no other rank waits for this process, so a signal may end the wait.

        Raises:
            PreemptionRequested: this process was asked to end meanwhile.
        """
        if not alone:
            return take()
        with checked_waits(self._end_wait):
            return take()

    def _end_wait(self) -> None:
        # Not raised by the handler: that may run as a batch is taken already, which would be lost.
        if self._number:
            raise PreemptionRequested(self._number, time.monotonic() - self._at)


@contextmanager
def backups_kept(callbacks: Iterable[Any]) -> Iterator[None]:
    """Have Keras' BackupAndRestore keep its files in the block's `on_train_end`: training is not
    complete, and continues from them."""
    backups = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    removing = [backup for backup in backups if backup.delete_checkpoint]
    for backup in removing:
        backup.delete_checkpoint = False
    try:
        yield
    finally:
        for backup in removing:
            backup.delete_checkpoint = True


def checkpoint_and_exit(
    context: RunContext,
    state: TrainState,
    callbacks: keras.callbacks.CallbackList,
    request: PreemptionRequested,
    gather_times: Callable[[], object],
) -> NoReturn:
    """Save, end training, and end the program. All ranks call it at the same step.

    Args:
        gather_times: tells callbacks what each rank's time went to.

    Raises:
        Interrupted: on every rank.
        CheckpointError: on every rank, if the state could not be saved.
    """
    world, step = context.world, state.progress.step
    grace = context.config.trainer.interrupt.grace
    kept = min(grace / 10, _TO_END_SECONDS)
    savers = [c for c in callbacks.callbacks if isinstance(c, Checkpoint)]
    for saver in savers:
        saver.save_in_time(grace - request.seconds - kept)
    state.end = {"reason": "interrupted", "why": signal.Signals(request.number).name}
    with backups_kept(callbacks.callbacks):
        callbacks.on_train_end(logs={})
    gather_times()
    saved = None
    if world.is_root:
        found = [latest for saver in savers if (latest := saver.latest()) is not None]
        saved = (str(found[0].path), found[0].step) if found else None
    saved = world.broadcast(saved, 0, "last checkpoint before the end")
    path, saved_at = saved or (None, None)
    add = words_to_resume(context, state, path) if path is not None else ""
    kind = InterruptedByKeyboard if request.number == signal.SIGINT else Interrupted
    ended = kind(request.number, step, path, saved_at, add)
    if world.is_root and LAUNCHED not in os.environ:
        print(f"ktrainer: {ended}", file=sys.stderr, flush=True)
    raise ended
