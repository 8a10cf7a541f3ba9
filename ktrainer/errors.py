"""Errors that state what happened, why, and the remedy.

All but `Interrupted` derive from `KtrainerError`, which distinguishes them from bugs.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


class KtrainerError(Exception):
    """Base of all errors that ktrainer raises on purpose. They pickle with their attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self.args, self.__dict__)


def _unpickle(kind: type[KtrainerError], args: tuple[Any, ...], state: Any) -> KtrainerError:
    """Rebuild an error without its constructor, which would compose the message again."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(KtrainerError):
    """A key, value or combination in the configuration that cannot work.

    Args:
        message: the mistake and the remedy.
        path: dotted path of the key, for example `"backend.engine"`.
        value: the offending value; shown when given.
        known: the valid names; the nearest one is suggested.
        needs: keys whose defaults the value contradicts: it can work if a script sets them.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        value: Any = None,
        known: Iterable[str] = (),
        needs: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.value = value
        self.needs = tuple(needs)
        where = f"{path}: " if path else ""
        near = nearest(str(value if value is not None else (path or "").split(".")[-1]), known)
        hint = f" Did you mean {near!r}?" if near else ""
        super().__init__(f"{where}{message}{hint}")


class SetupError(KtrainerError):
    """Something that must be installed, built or started is missing."""


class DataError(KtrainerError):
    """The user's data has a shape, type or length that cannot be trained on."""


class ModelError(KtrainerError):
    """The user's model cannot be trained as configured."""


class WorldError(KtrainerError):
    """A group of processes cannot work together."""


class DeadlineExceeded(WorldError):
    """A wait for other ranks exceeded its deadline.

    Args:
        rank: the rank that waited.
        step: its global step.
        operation: the operation that it waited in.
        seconds: how long it waited.
        others: sentences about the state of the other ranks, where known; on further lines, the
            stacks of missing ones.
        setting: the key of the deadline.
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
        others = others or "One of them has stopped, failed, or taken another path."
        others, _, where = others.partition("\n")
        super().__init__(
            f"rank {rank} waited {seconds:g} s at step {step} in {operation!r} for other ranks. "
            f"{others} If it may take that long, raise {setting}." + (f"\n{where}" if where else "")
        )


class PeerLost(WorldError):
    """Another rank was lost while this one was communicating with it."""


class RanksLost(PeerLost):
    """Ranks were lost; the surviving ones have ended, after a checkpoint where possible.

    Args:
        message: which ranks were lost, and whether the state was saved.
        checkpoint: path of the newest checkpoint; None if there is none.

    Attributes:
        exit_code: the exit code of a launched process: 75 (EX_TEMPFAIL) if there is a checkpoint
            to resume from, as the message says, else 1.
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
    """Training was interrupted by a signal, on all ranks after the same step.

    It ends the program, past `except Exception`, with exit code 75 (EX_TEMPFAIL) if there is a
    checkpoint to resume from, else with 128 plus the signal's number, as a shell reports it.

    Args:
        signal_number: the signal.
        step: updates done.
        checkpoint: path of the newest checkpoint of the run; None if there is none.
        saved_at: its step.
        add: settings to add to the command to resume from it, such as `checkpoint.resume=PATH`;
            empty: the same command resumes.
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
        return f"{text}, checkpoint{of} {self.checkpoint}; run {how} to resume"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signal, self.step, self.checkpoint, self.saved_at, self.add)


class InterruptedByKeyboard(Interrupted, KeyboardInterrupt):
    """`Interrupted` by SIGINT, as Ctrl-C sends it, which `except KeyboardInterrupt` catches too."""


RUN_AGAIN = 75  # EX_TEMPFAIL


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` closest to `name`, in any case, or None when nothing is close."""
    spelled = {each.lower(): each for each in known}
    matches = get_close_matches(name.lower(), list(spelled), n=1, cutoff=0.6)
    return spelled[matches[0]] if matches else None


def name_ranks(ranks: Collection[int]) -> str:
    """`"rank 1"`, or `"ranks 1, 2"`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
