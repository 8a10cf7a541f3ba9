"""Restart a failed group from its last checkpoint.

It is not restarted after

- a failure that would repeat: a mistake in configuration, data or model, a checkpoint that does
  not fit or cannot be written, the script's own exit code;
- a signal or `--timeout`;
- two failures without a new checkpoint in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ktrainer.distributed import restart_records
from ktrainer.launch.failure_report import Failure
from ktrainer.launch.group_state import GroupEnd
from ktrainer.launch.rank_channel import Note
from ktrainer.launch.warm_process import WarmProcess

MOST_SECONDS = 60.0  # between a failure and the next start
SOON_SECONDS = 60.0  # a group that ran longer did not fail soon
_LOOK_SECONDS = 0.1


@dataclass
class Restarts:
    """The restarts of one launch.

    Args:
        limit: how many there may be.
        backoff: seconds before the first; twice as long before each one that follows within a
            minute, up to a minute.
        records: the folder of `restart_records`, which exists as long as the launch.
        warm: the process of which the next ranks are forks, the reason why there is none, or None:
            none is wanted.
        count: restarts so far.
        soon: how many of the last ones followed one another soon.
    """

    limit: int
    backoff: float
    records: Path
    warm: WarmProcess | str | None = None
    count: int = 0
    soon: int = 0
    _started: float = field(default_factory=time.monotonic, repr=False)
    _saves: dict[str, int] | None = field(default=None, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks of the next start."""
        own = {restart_records.COUNT: str(self.count)}
        return {**own, restart_records.RECORDS: str(self.records)} if self.limit else own

    @property
    def has_saved(self) -> bool:
        """Return whether there is a checkpoint to resume from."""
        return bool(restart_records.saves(self.records))

    @property
    def seconds(self) -> float:
        """Seconds to wait before the next start."""
        return float(min(MOST_SECONDS, self.backoff * 2**self.soon))

    def command(self, command: Sequence[str]) -> Sequence[str]:
        """The `command` of mpirun, with forks of the warm process as ranks where that works."""
        self.why_cold()
        return self.warm.command(command) if isinstance(self.warm, WarmProcess) else command

    def why_cold(self) -> str:
        """The reason why ranks of the next start must import TensorFlow; empty: they need not, or
        no other way is wanted."""
        if isinstance(self.warm, WarmProcess):
            self.warm.check()
            return self.warm.why_not
        return self.warm or ""

    def why_not(self, end: GroupEnd, failure: Failure) -> str | None:
        """The reason not to start the group again; None to start it. Empty: print nothing.

        Args:
            end: how it ended.
            failure: the first one.
        """
        if not self.limit:
            return ""
        note = end.failures.get(failure.rank) if failure.rank is not None else None
        if not end.started or (note is not None and note.final):
            return f"not started again: {_repeats(note)}"
        saves = restart_records.saves(self.records)
        before, self._saves = self._saves, saves
        if self.count >= self.limit:
            return f"not started again: that was restart {self.count} of {self.limit}"
        if before is not None and not _is_further(saves, before):
            return "not started again: there was no new checkpoint between the last two failures"
        return None

    def wait(self, signals: list[int], until: float | None = None) -> int | str | None:
        """Wait for the next start, and count it; return a signal or `"timeout"` that comes first.

        Args:
            signals: those that this process has received; the first one is removed and returned.
            until: when `--timeout` ends, by the monotonic clock.
        """
        if time.monotonic() - self._started > SOON_SECONDS:
            self.soon = 0
        start = time.monotonic() + self.seconds
        while (now := time.monotonic()) < start:
            if signals:
                return signals.pop(0)
            if until is not None and now >= until:
                return "timeout"
            time.sleep(min(_LOOK_SECONDS, start - now))
        self.count, self.soon, self._started = self.count + 1, self.soon + 1, time.monotonic()
        return None


def _is_further(saves: dict[str, int], before: dict[str, int]) -> bool:
    return any(step > before.get(folder, -1) for folder, step in saves.items())


def _repeats(note: Note | None) -> str:
    if note is None:
        return "no process came to run the script"
    name = note.kind.rpartition(".")[2]
    if name == "SystemExit":
        return "the script chose to end"
    return f"after {name} another try would fail in the same way"
