"""Stack dumps of other processes of this host: the Python stacks of all their threads.

Each process has Python's fault handler write all its stacks, on SIGUSR2, to a file in memory that
others of the same user open through /proc. That works whatever the process is doing, in native
code too, needs no thread of its own, and leaves no file behind. Only a stopped process cannot
answer; that is seen from its state.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

DUMP_SIGNAL = signal.SIGUSR2
_SECONDS = 0.5  # for an answer; it takes milliseconds
_LINES = 60  # of one process that are shown
_STATES = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}

Name = TypeVar("Name", int, str)

_file: int | None = None


@dataclass(frozen=True)
class Process:
    """A process as others identify it, to request its stacks or to end it.

    Attributes:
        pid: its number.
        born: when it started: its number may have been reused.
        where: names the host, and the namespace that `pid` belongs to.
        file: number of its dump file; None if it has another use for the signal.
    """

    pid: int
    born: float
    where: str
    file: int | None


def enable_stack_dumps() -> Process:
    """Let other processes request this one's stacks; returns what they need to know."""
    global _file
    free = signal.getsignal(DUMP_SIGNAL) == signal.SIG_DFL
    if _file is None and free and hasattr(os, "memfd_create"):
        _file = os.memfd_create("ktrainer-stacks")
        faulthandler.register(DUMP_SIGNAL, _file, all_threads=True, chain=False)
    pid = os.getpid()
    return Process(pid, psutil.Process().create_time(), _where(), _file)


def kill(process: Process) -> bool:
    """Kill a process of this host; return whether it is of this host. One that has ended, or whose
    number has been reused, is left alone."""
    if process.where != _where():
        return False
    with suppress(psutil.Error):
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.born) < 1.0:
            found.send_signal(signal.SIGKILL)
    return True


def has_ended(process: Process) -> bool:
    """Return whether a process is known to have ended; one of another host never is."""
    if process.where != _where():
        return False
    try:
        found = psutil.Process(process.pid)
        return abs(found.create_time() - process.born) > 1 or found.status() == "zombie"
    except psutil.Error:
        return True


def stack_dumps(processes: Mapping[Name, Process], names: Sequence[Name]) -> str:
    """The stacks of each of `names`, or the reason why there are none, for an error message.

    Args:
        processes: all processes, by rank or by name.
        names: those to ask.
    """
    requests = {name: _DumpRequest(processes[name]) for name in names if name in processes}
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and not all(each.is_complete() for each in requests.values()):
        time.sleep(0.02)
    called = {name: f"rank {name}" if isinstance(name, int) else name for name in requests}
    return "\n".join(f"{called[name]} {each.text()}" for name, each in requests.items())


class _DumpRequest:
    """A request for the stacks of one process, and its answer."""

    def __init__(self, process: Process) -> None:
        self._process, self._dump, self._settled = process, "", False
        self._problem = self._find()
        if self._problem is None:
            self._path = Path(f"/proc/{process.pid}/fd/{process.file}")
            try:
                self._start = self._path.stat().st_size
                os.kill(process.pid, DUMP_SIGNAL)
            except OSError as error:
                self._problem = f"(process {process.pid}) cannot be asked: {error.strerror}"

    def _find(self) -> str | None:
        """Why the process cannot be asked; None if it can."""
        process = self._process
        named = f"(process {process.pid})"
        if process.where != _where():
            return f"{named} is on another host: {process.where.split()[0]}"
        if has_ended(process):
            return f"{named} has ended"
        try:
            status = psutil.Process(process.pid).status()
        except psutil.Error:
            return f"{named} has ended"
        if status in _STATES:
            return f"{named} is stopped (state {_STATES[status]}): by SIGSTOP, or a debugger"
        if process.file is None:
            return f"{named} runs, but has another use for {DUMP_SIGNAL.name}"
        return None

    def is_complete(self) -> bool:
        """Read what has been written; return whether that is all."""
        if self._problem is not None or self._settled:
            return True
        try:
            text = self._path.read_bytes()[self._start :].decode(errors="replace")
        except OSError:
            self._problem = f"(process {self._process.pid}) has ended"
            return True
        self._settled = bool(text) and text == self._dump
        self._dump = text
        return self._settled

    def text(self) -> str:
        """The answer, or the reason why there is none."""
        if self._problem is not None:
            return self._problem
        if not self._dump:
            return f"(process {self._process.pid}) has not written its stacks"
        lines = self._dump.strip().splitlines()
        more = [f"  ... {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
        shown = [f"  {line}" for line in lines[:_LINES]]
        return "\n".join([f"(process {self._process.pid}) is at:", *shown, *more])


def _where() -> str:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{os.uname().nodename} {namespace}"
