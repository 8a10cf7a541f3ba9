"""Find the first failure of a group, and describe it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktrainer.errors import name_ranks
from ktrainer.launch.rank_channel import Note

# mpirun names the process whose end it noticed first.
_SIGNALLED = re.compile(r"process rank (\d+) with PID \d+ .*?exited\s+on\s+signal (\d+)", re.DOTALL)
_EXITED = re.compile(r"Process name: \[[^\]]*,(\d+)\]\s+Exit code:\s+(\d+)")

_IMPROPER = re.compile(
    r"exited due to process rank (\d+) with PID \d+ on node \S+\s+exiting\s+improperly"
)
_DAEMON = re.compile(
    r"lost communication with a remote daemon.*?Remote daemon: .*? on node (\S+)", re.S
)

LOST = "ktrainer.errors.RanksLost"  # all surviving ranks report it; it says what they saved
SIGNAL_BASE = 128  # a shell's exit code for a process that a signal ended is this plus its number

_DAEMON_LOST = (
    "mpirun has lost its daemon (prted) on host {0}, which still answers: the daemon was killed, "
    "often for lack of memory, or the link was down for a while. See that host's system log "
    "(dmesg), or let --max-restarts start all processes again"
)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    Attributes:
        rank: which one; None when mpirun itself failed.
        code: the exit code of the launch.
        headline: one line for the user.
        text: its traceback or stack; may be empty.
    """

    rank: int | None
    code: int
    headline: str
    text: str = ""


def first_failure(
    notes: Mapping[int, Note],
    silent: Sequence[int],
    mpirun_code: int,
    mpirun_output: str,
    faults: Mapping[int, str],
) -> Failure | None:
    """The failure that caused the others, or None when there is none.

    A rank that raised comes before one that only lost a peer; among equals the earliest counts.
    A killed rank reports nothing: mpirun names it, else it is the first one that ended silently.
    mpirun counts the loss of its daemon on another host as a success.

    Args:
        notes: the failures that ranks reported.
        silent: ranks that ended without a report, in the order of their ends.
        mpirun_code, mpirun_output: mpirun's exit code and output.
        faults: rank -> the stack that Python's fault handler wrote.
    """
    reported = sorted(notes.items(), key=lambda item: (item[1].follows, item[1].time))
    if reported and not reported[0][1].follows:
        return _raised(*reported[0])
    lost = [note for _, note in reported if note.kind == LOST]
    if lost:
        return _survivors_failure(lost[0])
    killed = _killed(mpirun_output, faults)
    if killed is not None and killed.rank not in notes:
        return killed
    if match := _DAEMON.search(mpirun_output):
        return Failure(None, mpirun_code or 1, _DAEMON_LOST.format(match[1]))
    if reported:
        return _raised(*reported[0])
    if mpirun_code == 0:
        return None
    if silent:
        rank = silent[0]
        code = mpirun_code
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    return Failure(None, mpirun_code, f"mpirun ended with exit code {mpirun_code}", mpirun_output)


def missed_failure(notes: Mapping[int, Note], missed: int, faults: Mapping[int, str]) -> Failure:
    """The failure of a group that heals, in which the others could not continue without a rank.

    mpirun, which is to tolerate lost ranks, does not say how it was lost.

    Args:
        notes: the failures that ranks reported; one that caused itself comes first.
        missed: the rank that ended without a report.
        faults: rank -> the stack that Python's fault handler wrote.
    """
    own = {rank: note for rank, note in notes.items() if not note.follows}
    if (first := first_failure(own, (), 0, "", {})) is not None:
        return first
    headline = (
        f"rank {missed} was killed, often by the system for lack of memory or by another rank that "
        "it did not answer, or left by os._exit, before the first step of fit or after its end, "
        "where the others cannot continue without it"
    )
    return Failure(missed, 1, headline, faults.get(missed, ""))


def host_failure(lost: Mapping[int, str], code: int) -> Failure:
    """The failure of a group whose hosts were lost.

    Args:
        lost: rank -> its host.
        code: mpirun's exit code.
    """
    return Failure(None, code or 1, describe_lost(lost))


def describe_lost(lost: Mapping[int, str]) -> str:
    """The lost hosts with their ranks, for a message.

    Args:
        lost: rank -> its host.
    """
    names = sorted(set(lost.values()))
    listed = " and ".join(names)
    hosts = f"host {listed} was" if len(names) == 1 else f"hosts {listed} were"
    why = "its processes have ended, or no packet arrives from there"
    return f"{hosts} lost, with {name_ranks(sorted(lost))}: {why}"


def late_failure(why: str, absent: Sequence[int], faults: Mapping[int, str]) -> Failure:
    """The failure of a group in which ranks waited in vain for others to start.

    Args:
        why: which ranks waited for which.
        absent: the ranks that did not start.
        faults: rank -> its stack.
    """
    stacks = [f"rank {rank} is at:\n{faults[rank].strip()}" for rank in absent if rank in faults]
    return Failure(None, 1, why, "\n".join(stacks))


def others(notes: Mapping[int, Note], first: Failure) -> list[str]:
    """One line for each further rank that reported a failure."""
    lines = []
    for rank, note in sorted(notes.items()):
        message = error_message(note)
        if rank != first.rank and message != f"{note.kind}: {first.headline}":
            lines.append(f"rank {rank} then failed too: {message}")
    return lines


def error_message(note: Note) -> str:
    """The first line of the error's message; the stacks of other ranks may follow it."""
    text = note.text.strip().splitlines()
    named = [line for line in text if line.startswith(f"{note.kind}:")]
    return [*named[-1:], *text[-1:], f"exit code {note.code}"][0]


def _survivors_failure(note: Note) -> Failure:
    """The failure that all surviving ranks reported when they ended together."""
    return Failure(None, note.code, error_message(note).removeprefix(f"{note.kind}: "))


def _raised(rank: int, note: Note) -> Failure:
    name = note.kind.rpartition(".")[2]
    what = f"ended with exit code {note.code}" if name == "SystemExit" else f"raised {name}"
    return Failure(rank, note.code, f"rank {rank} {what}", note.text)


def _killed(mpirun_output: str, faults: Mapping[int, str]) -> Failure | None:
    if match := _SIGNALLED.search(mpirun_output):
        rank, number = int(match[1]), int(match[2])
        code = SIGNAL_BASE + number
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    if match := _EXITED.search(mpirun_output):
        rank, code = int(match[1]), int(match[2])
        return Failure(rank, code, _ended_by(rank, code), faults.get(rank, ""))
    if match := _IMPROPER.search(mpirun_output):
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
