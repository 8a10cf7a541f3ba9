"""Where another process of this host is: the Python stacks of its threads.

Each process has Python's fault handler write all its stacks, on SIGUSR2, to a file in memory that
others of the same user open through /proc. That works whatever the process is doing, in native
code too, needs no thread of its own, and leaves nothing behind. Only a process that has been
stopped cannot answer; that is seen from its state.
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

ASK = signal.SIGUSR2
_SECONDS = 0.5  # for an answer; it takes milliseconds
_LINES = 60  # of one process that are shown
_STATES = {psutil.STATUS_STOPPED: "T", psutil.STATUS_TRACING_STOP: "t"}

Name = TypeVar("Name", int, str)

_file: int | None = None


@dataclass(frozen=True)
class Process:
    """What others must know to ask a process where it is.

    Attributes:
        pid: its number.
        born: when it started: its number may be another's by now.
        where: names the host, and the namespace that `pid` belongs to.
        file: number of its file; None if it has another use for the signal.
    """

    pid: int
    born: float
    where: str
    file: int | None


def answering() -> Process:
    """Have this process answer from now on; what others must know."""
    global _file
    free = signal.getsignal(ASK) == signal.SIG_DFL
    if _file is None and free and hasattr(os, "memfd_create"):
        _file = os.memfd_create("ktrainer-stacks")
        faulthandler.register(ASK, _file, all_threads=True, chain=False)
    pid = os.getpid()
    return Process(pid, psutil.Process().create_time(), _where(), _file)


def end(process: Process) -> bool:
    """Kill a process, if it is of this host; whether it is. One that has ended, or whose number
    another has by now, is left alone."""
    if process.where != _where():
        return False
    with suppress(psutil.Error):
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.born) < 1.0:
            found.send_signal(signal.SIGKILL)
    return True


def has_ended(process: Process) -> bool:
    """Whether it is known that a process is no more; one of another host may be there."""
    if process.where != _where():
        return False
    try:
        found = psutil.Process(process.pid)
        return abs(found.create_time() - process.born) > 1 or found.status() == "zombie"
    except psutil.Error:
        return True


def where_they_are(processes: Mapping[Name, Process], names: Sequence[Name]) -> str:
    """Lines on what each of `names` is doing, for an error message.

    Args:
        processes: of all, by rank or by what they are called.
        names: whom to ask.
    """
    asked = {name: _Asked(processes[name]) for name in names if name in processes}
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and not all(each.look() for each in asked.values()):
        time.sleep(0.02)
    called = {name: f"rank {name}" if isinstance(name, int) else name for name in asked}
    return "\n".join(f"{called[name]} {each.says()}" for name, each in asked.items())


class _Asked:
    """One process, from the question to the answer."""

    def __init__(self, process: Process) -> None:
        self._process, self._text, self._settled = process, "", False
        self._problem = self._find()
        if self._problem is None:
            self._path = Path(f"/proc/{process.pid}/fd/{process.file}")
            try:
                self._start = self._path.stat().st_size
                os.kill(process.pid, ASK)
            except OSError as error:
                self._problem = f"(process {process.pid}) cannot be asked: {error.strerror}"

    def _find(self) -> str | None:
        """Why it cannot be asked; None if it can."""
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
            return f"{named} is there, but has another use for {ASK.name}"
        return None

    def look(self) -> bool:
        """Whether all of the answer is there."""
        if self._problem is not None or self._settled:
            return True
        try:
            text = self._path.read_bytes()[self._start :].decode(errors="replace")
        except OSError:
            self._problem = f"(process {self._process.pid}) has ended"
            return True
        self._settled = bool(text) and text == self._text
        self._text = text
        return self._settled

    def says(self) -> str:
        if self._problem is not None:
            return self._problem
        if not self._text:
            return f"(process {self._process.pid}) does not say where it is"
        lines = self._text.strip().splitlines()
        more = [f"  ... {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
        shown = [f"  {line}" for line in lines[:_LINES]]
        return "\n".join([f"(process {self._process.pid}) is at:", *shown, *more])


def _where() -> str:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{os.uname().nodename} {namespace}"
