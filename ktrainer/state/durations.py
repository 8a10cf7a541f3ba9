"""Durations with units, and "every so often".

`"1ep"` is one epoch, `"500ba"` five hundred updates, and `"30s"`, `"10m"`, `"2h"`, `"1h30m"` are
times. A duration without a unit is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ktrainer.errors import ConfigError

if TYPE_CHECKING:
    from ktrainer.state.progress import Progress

Unit = Literal["ep", "ba", "s"]

_COUNT = re.compile(r"(\d+(?:\.\d+)?)(ep|ba)")
_TIME = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WORDS = {"ep": "epochs", "ba": "updates", "s": "seconds"}
_EXAMPLES = {"ep": "'1ep' (epochs)", "ba": "'500ba' (updates)", "s": "'30s', '10m', '2h' (time)"}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of training.

    Attributes:
        value: how much; never negative. Updates are whole numbers.
        unit: `"ep"` epochs, `"ba"` updates, or `"s"` seconds.
    """

    value: int | float
    unit: Unit

    @classmethod
    def parse(
        cls,
        text: str | Duration,
        path: str | None = None,
        units: Sequence[str] = ("ep", "ba", "s"),
    ) -> Duration:
        """The duration that `text` stands for; a `Duration` is returned as it is.

        Args:
            text: for example `"1ep"`, `"0.5ep"`, `"500ba"`, `"90s"`, `"1h30m"`.
            path: the configuration key that it came from, for the error message.
            units: those that this key takes: errors offer no others. They are not checked.

        Raises:
            ConfigError: if `text` is no number with a unit.
        """
        if isinstance(text, Duration):
            return text
        compact = str(text).replace(" ", "").lower()
        if found := _COUNT.fullmatch(compact):
            return cls._count(float(found[1]), found[2], text, path)
        if _TIME.fullmatch(compact):
            seconds = sum(float(n) * _SECONDS[u] for n, u in _TIME_PART.findall(compact))
            return cls(_whole(seconds), "s")
        if re.fullmatch(r"\d+(\.\d+)?", compact):
            offers = " or ".join(f"'{compact}{unit}' for {_WORDS[unit]}" for unit in units)
            message = f"{text!r} has no unit: write {offers}."
        else:
            examples = " or ".join(_EXAMPLES[unit] for unit in units)
            message = (
                f"{text!r} is not a duration: write a number and its unit, such as {examples}."
            )
        raise ConfigError(message, path=path, value=text)

    @classmethod
    def _count(cls, value: float, unit: str, text: Any, path: str | None) -> Duration:
        if unit == "ep":
            return cls(_whole(value), "ep")
        if value != int(value):
            message = f"{text!r} is not a whole number of updates."
            raise ConfigError(message, path=path, value=text)
        return cls(int(value), "ba")

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    @property
    def seconds(self) -> float:
        """The duration in seconds; `ValueError` unless its unit is time."""
        if self.unit != "s":
            raise ValueError(f"{self} is not a time")
        return float(self.value)

    def steps(self, steps_per_epoch: int | None) -> float:
        """The duration in updates.

        Args:
            steps_per_epoch: updates in one epoch; needed for epochs only.

        Raises:
            ConfigError: for a time, which is no number of updates, and for epochs when the
                length of an epoch is unknown.
        """
        if self.unit == "ba":
            return float(self.value)
        if self.unit == "s":
            raise ConfigError(
                f"'{self}' is a time; give epochs or updates, such as '1ep', '500ba'."
            )
        if steps_per_epoch is None:
            raise ConfigError(
                f"'{self}' cannot be counted in updates, as the data's length is unknown: "
                "give updates, such as '500ba'."
            )
        return self.value * steps_per_epoch


def _whole(value: float) -> int | float:
    """`value` as an int where that is exact, so that `"1ep"` prints as `1ep`."""
    return int(value) if value == int(value) else value


class Every:
    """Decides when something that happens every so often is due.

    For epochs and updates the decision is a function of the counters that all ranks share, so
    they agree without talking. For time it is each rank's own: where `needs_agreement`, ask on
    rank 0 and broadcast the answer.

    Args:
        duration: how often; None is never.
        steps_per_epoch: updates in one epoch, needed for fractions of an epoch only.
    """

    def __init__(self, duration: str | Duration | None, steps_per_epoch: int | None = None) -> None:
        self.duration = None if duration is None else Duration.parse(duration)
        if self.duration is not None and self.duration.value <= 0:
            raise ConfigError(f"'{duration}' is never over: give a duration above zero, or null.")
        self.steps_per_epoch = steps_per_epoch
        self._seen_step: int | None = None
        self._fired_step: int | None = None
        self._fired_at: float | None = None

    def __repr__(self) -> str:
        return f"Every({str(self.duration)!r})" if self.duration else "Every(None)"

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks may answer differently, so that rank 0's answer must be broadcast."""
        return self.duration is not None and self.duration.unit == "s"

    def start(self, progress: Progress) -> None:
        """Begin to count at `progress`: call it when training starts or resumes."""
        self._seen_step = progress.step
        # Not this step: a checkpoint taken just before an epoch's end resumes into that end.
        self._fired_step = None
        self._fired_at = progress.elapsed

    def heal(self, progress: Progress) -> None:
        """Return to an earlier `progress`, after which updates are repeated; time is not."""
        self._seen_step, self._fired_step = progress.step, None

    def due(self, progress: Progress, *, epoch_end: bool = False) -> bool:
        """Whether it is due now; true at most once for one global step.

        Args:
            progress: the counters after an update.
            epoch_end: whether an epoch ends here; ask at that point too, else whole epochs
                are never due. It makes no difference whether the epoch is counted already.
        """
        if self.duration is None:
            return False
        before = self._seen_step if self._seen_step is not None else max(progress.step - 1, 0)
        self._seen_step = progress.step
        if progress.step == self._fired_step:
            return False
        if self.duration.unit == "s":
            due = self._due_time(progress)
        elif (stride := self._stride()) is not None:
            due = _crossed(before, progress.step, stride)
        else:
            due = epoch_end and self._due_epoch(progress)
        if due:
            self._fired_step, self._fired_at = progress.step, progress.elapsed
        return due

    def fired_at(self, step: int) -> bool:
        """Whether it was due at this step, as `due` has said."""
        return step == self._fired_step

    def updates_until_due(self, progress: Progress) -> int | None:
        """Updates from `progress` to the next step at which it is due; None if the end of an epoch
        or the clock decides."""
        stride = self._stride()
        if stride is None:
            return None
        step = progress.step
        count = max(1, math.ceil((math.floor(step / stride) + 1) * stride - step))
        # Products and quotients of fractions are rounded.
        while count > 1 and _crossed(step, step + count - 1, stride):
            count -= 1
        return count if _crossed(step, step + count, stride) else count + 1

    def _stride(self) -> float | None:
        """Updates from one time to the next; None for whole epochs and times."""
        duration = self.duration
        if duration is None or duration.unit == "s":
            return None
        if duration.unit == "ep" and isinstance(duration.value, int):
            return None
        return duration.steps(self.steps_per_epoch)

    def _due_time(self, progress: Progress) -> bool:
        if self._fired_at is None:
            self._fired_at = 0.0 if progress.step <= 1 else progress.elapsed
        assert self.duration is not None
        return progress.elapsed - self._fired_at >= self.duration.value

    def _due_epoch(self, progress: Progress) -> bool:
        assert self.duration is not None
        finished = progress.epoch + (1 if progress.batch else 0)
        return finished > 0 and finished % self.duration.value == 0


def _crossed(before: int, now: int, stride: float) -> bool:
    """Whether a positive multiple of `stride` lies in (before, now].

    A call may count several steps at once (`trainer.steps_per_call`), so a plain modulo would
    miss some.
    """
    return math.floor(now / stride) > math.floor(before / stride)
