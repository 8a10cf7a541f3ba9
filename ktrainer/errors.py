"""Errors that say what went wrong, why, and what to do.

Every error that ktrainer raises on purpose derives from `KtrainerError`, so a script can tell
a mistake that we explain from a bug that we do not.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


class KtrainerError(Exception):
    """Base of all errors that ktrainer raises on purpose. They pickle, attributes included."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(kind: type[KtrainerError], args: tuple[Any, ...], state: Any) -> KtrainerError:
    """An error with its final message, past a constructor that would make it anew."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(KtrainerError):
    """A key, value or combination in the configuration that cannot work.

    Args:
        message: what is wrong and what to do about it.
        path: dotted path of the key, for example `"backend.engine"`.
        value: the offending value; shown when given.
        known: the valid names; the nearest one is suggested.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        value: Any = None,
        known: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.value = value
        where = f"{path}: " if path else ""
        near = nearest(str(value if value is not None else (path or "").split(".")[-1]), known)
        hint = f" Did you mean {near!r}?" if near else ""
        super().__init__(f"{where}{message}{hint}")


class SetupError(KtrainerError):
    """Something that must be installed, built or started is not there."""


class DataError(KtrainerError):
    """The user's data has a shape, type or length that cannot be trained on."""


class ModelError(KtrainerError):
    """The user's model cannot be trained in the way that the configuration asks for."""


class WorldError(KtrainerError):
    """A group of processes cannot work together."""


class DeadlineExceeded(WorldError):
    """A wait on other ranks took longer than it may.

    Args:
        rank: the rank that waited.
        step: its global step.
        operation: what it waited for.
        seconds: how long it waited.
        others: sentences on what the other ranks are doing, where that is known; on further lines,
            where those that are missing are.
        setting: the key that says how long such a wait may take.
    """

    def __init__(
        self,
        rank: int,
        step: int,
        operation: str,
        seconds: float,
        others: str = "",
        setting: str = "world.deadline",
    ) -> None:
        self.rank, self.step, self.operation, self.seconds = rank, step, operation, seconds
        self.others = others
        others = others or "One of them has stopped, died, or taken another path."
        others, _, where = others.partition("\n")
        super().__init__(
            f"rank {rank} waited {seconds:g} s at step {step} in {operation!r} for other ranks. "
            f"{others} If it may take that long, raise {setting}." + (f"\n{where}" if where else "")
        )


class PeerLost(WorldError):
    """Another rank died while this one was communicating with it."""


class RanksDied(PeerLost):
    """Ranks have died, and those that were left have ended, having saved what they could.

    Args:
        message: who died, and what became of the state.
        checkpoint: path of the newest checkpoint; None if there is none.

    Attributes:
        exit_code: what a launched process ends with: 75 (EX_TEMPFAIL) where there is a checkpoint
            to go on from, as the message says, else 1.
    """

    def __init__(self, message: str, checkpoint: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.exit_code = RUN_AGAIN if checkpoint else 1
        super().__init__(message)


class DivergenceError(WorldError):
    """Ranks that must agree do not: on config, model, data, weights or log keys."""


class CheckpointError(KtrainerError):
    """A checkpoint cannot be written, or must not be read."""


class Interrupted(SystemExit):
    """The process was asked to end while it trained, and all ranks have left at the same step.

    It ends the program, past `except Exception`, with exit code 75 (EX_TEMPFAIL) where there is a
    checkpoint to go on from, else with 128 plus the signal's number, as a shell says of a program
    that the signal ended.

    Args:
        signal_number: what asked for it.
        step: updates done.
        checkpoint: path of the newest checkpoint of the run; None if there is none.
        saved_at: its step.
        add: the settings that the command needs more to go on from it, such as
            `checkpoint.resume=PATH`; empty: the same command goes on.
    """

    def __init__(
        self,
        signal_number: int,
        step: int,
        checkpoint: str | None = None,
        saved_at: int | None = None,
        add: str = "",
    ) -> None:
        self.signal, self.step = signal_number, step
        self.checkpoint, self.saved_at, self.add = checkpoint, saved_at, add
        super().__init__(RUN_AGAIN if checkpoint else 128 + signal_number)

    def __str__(self) -> str:
        text = f"interrupted by {signal.Signals(self.signal).name} at step {self.step}"
        if self.checkpoint is None:
            return f"{text}, and there is no checkpoint"
        of = "" if self.saved_at == self.step else f" of step {self.saved_at}"
        how = f"the command again with {self.add}" if self.add else "the same command again"
        return f"{text}, checkpoint{of} {self.checkpoint}; run {how} to go on"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal, self.step, self.checkpoint, self.saved_at, self.add)


RUN_AGAIN = 75  # EX_TEMPFAIL


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` closest to `name`, in any case, or None when nothing is close."""
    spelled = {each.lower(): each for each in known}
    matches = get_close_matches(name.lower(), list(spelled), n=1, cutoff=0.6)
    return spelled[matches[0]] if matches else None


def name_ranks(ranks: Collection[int]) -> str:
    """`"rank 1"`, or `"ranks 1, 2"`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
