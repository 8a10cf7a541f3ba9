"""Who failed first, and what to say about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktrainer.launch.channel import Note

# mpirun names the process that it noticed first.
_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ .*?exited\s+on\s+signal (\d+)", re.DOTALL)
_EXITED = re.compile(r"Process name: \[[^\]]*,(\d+)\]\s+Exit code:\s+(\d+)")

_IMPROPER = re.compile(
    r"exited due to process rank (\d+) with PID \d+ on node \S+\s+exiting\s+improperly"
)

_DIED = "ktrainer.errors.RanksDied"
SIGNAL_BASE = 128  # a shell's exit code for a process that a signal ended is this plus its number


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    Attributes:
        rank: which one; None when only mpirun itself is to blame.
        code: the exit code of the launch.
        headline: one line for a person.
        text: its traceback, or other last words; may be empty.
    """

    rank: int | None
    code: int
    headline: str
    text: str = ""


def first_failure(
    notes: Mapping[int, Note],
    gone: Sequence[int],
    mpirun_code: int,
    mpirun_said: str,
    faults: Mapping[int, str],
) -> Failure | None:
    """The failure that started it all, or None when there is none.

    A rank that raised comes before one that only lost a peer; among equals the earliest counts.
    A rank that was killed cannot say so: mpirun names it, else it is the first one that fell
    silent.

    Args:
        notes: the failures that ranks reported.
        gone: ranks that ended without a word, in the order of their ends.
        mpirun_code, mpirun_said: how mpirun ended, and its output.
        faults: rank -> the stack that Python's fault handler wrote.
    """
    said = sorted(notes.items(), key=lambda item: (item[1].follows, item[1].time))
    if said and not said[0][1].follows:
        return _raised(*said[0])
    died = [note for _, note in said if note.kind == _DIED]
    if died:
        return _died(died[0])
    killed = _killed(mpirun_said, faults)
    if killed is not None and killed.rank not in notes:
        return killed
    if said:
        return _raised(*said[0])
    if mpirun_code == 0:
        return None
    if gone:
        rank = gone[0]
        code = mpirun_code
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    return Failure(None, mpirun_code, f"mpirun ended with exit code {mpirun_code}", mpirun_said)


def missed_failure(notes: Mapping[int, Note], missed: int, faults: Mapping[int, str]) -> Failure:
    """The failure of a group that heals, in which the others could not go on without a rank.

    mpirun, which is to let ranks die, does not say how it died.

    Args:
        notes: the failures that ranks reported; one that raised by itself comes first.
        missed: the rank that ended without a word.
        faults: rank -> the stack that Python's fault handler wrote.
    """
    own = {rank: note for rank, note in notes.items() if not note.follows}
    if (first := first_failure(own, (), 0, "", {})) is not None:
        return first
    headline = (
        f"rank {missed} was killed, often by the system for lack of memory or by another rank that "
        "it did not answer, or left by os._exit, before the first step of fit or after its end, "
        "where the others cannot go on without it"
    )
    return Failure(missed, 1, headline, faults.get(missed, ""))


def late_failure(why: str, absent: Sequence[int], faults: Mapping[int, str]) -> Failure:
    """The failure of a group of which some ranks were waited for in vain at the start.

    Args:
        why: who waited for whom.
        absent: the ranks that did not come.
        faults: rank -> its stack, as it was asked for.
    """
    stacks = [f"rank {rank} is at:\n{faults[rank].strip()}" for rank in absent if rank in faults]
    return Failure(None, 1, why, "\n".join(stacks))


def others(notes: Mapping[int, Note], first: Failure) -> list[str]:
    """One line for each further rank that reported a failure."""
    lines = []
    for rank, note in sorted(notes.items()):
        message = _message(note)
        if rank != first.rank and message != f"{note.kind}: {first.headline}":
            lines.append(f"rank {rank} then failed too: {message}")
    return lines


def _message(note: Note) -> str:
    """The first line of the error's message: it may go on with the stacks of others."""
    text = note.text.strip().splitlines()
    named = [line for line in text if line.startswith(f"{note.kind}:")]
    return [*named[-1:], *text[-1:], f"exit code {note.code}"][0]


def _died(note: Note) -> Failure:
    """All that were left say the same, and have ended together."""
    return Failure(None, note.code, _message(note).removeprefix(f"{note.kind}: "))


def _raised(rank: int, note: Note) -> Failure:
    name = note.kind.rpartition(".")[2]
    what = f"ended with exit code {note.code}" if name == "SystemExit" else f"raised {name}"
    return Failure(rank, note.code, f"rank {rank} {what}", note.text)


def _killed(mpirun_said: str, faults: Mapping[int, str]) -> Failure | None:
    if match := _SIGNALLED.search(mpirun_said):
        rank, number = int(match[1]), int(match[2])
        code = SIGNAL_BASE + number
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    if match := _EXITED.search(mpirun_said):
        rank, code = int(match[1]), int(match[2])
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    if match := _IMPROPER.search(mpirun_said):
        rank = int(match[1])
        return Failure(rank, 1, f"rank {rank} left by os._exit, while others were waiting for it")
    return None


def _ended_by(rank: int, code: int) -> str:
    if code <= SIGNAL_BASE:
        return f"rank {rank} ended with exit code {code}"
    number = code - SIGNAL_BASE
    try:
        name = f"{signal.Signals(number).name}: {signal.strsignal(number)}"
    except ValueError:
        name = "unknown"
    hint = ", often by the system for lack of memory" if number == signal.SIGKILL else ""
    return f"rank {rank} was ended by signal {number} ({name}){hint}"
