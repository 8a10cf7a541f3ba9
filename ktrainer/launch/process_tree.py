"""Find and end the processes under the launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable

import psutil


def descendants(but: int | None = None) -> list[psutil.Process]:
    """All live processes under this one, adopted ones included, but for the process `but`."""
    every = psutil.Process().children(recursive=True)
    return [p for p in every if p.pid != but and is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Send a signal to each process that still exists."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until processes have ended, for at most `seconds`; return those that still run.

    `psutil.wait_procs` raises FileNotFoundError on recent kernels, where a process may be collected
    while it is asked for its pidfd.
    """
    deadline = time.monotonic() + seconds
    left = list(processes)
    while (left := [p for p in left if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def end_all(mpirun: int | None = None, seconds: float = 3.0, keep: int | None = None) -> None:
    """End every descendant: those under `mpirun` at once, then `mpirun` itself, then the rest.

    Args:
        mpirun: process id of mpirun, which gets `seconds` to notice and to remove its own files
            and shared memory before it is killed too.
        keep: process id of one that is spared; not so those under it.
    """
    every = descendants(keep)
    send((p for p in every if p.pid != mpirun), signal.SIGKILL)
    top = [p for p in every if p.pid == mpirun]
    wait_until_ended(top, seconds)
    send(top, signal.SIGTERM)
    wait_until_ended(top, seconds)
    deadline = time.monotonic() + seconds
    # A process may have forked meanwhile.
    while (left := descendants(keep)) and time.monotonic() < deadline:
        send(left, signal.SIGKILL)
        time.sleep(0.02)


def reap_adopted(keep: int | None = None) -> None:
    """Collect ended processes that were adopted, once all children of this one but `keep` have been
    waited for."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid != keep and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def wait_or_kill(processes: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait for child processes; kill those that have not ended within `seconds` for all of them."""
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ending(code: int) -> str:
    """How a child process with this return code has ended, for messages."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})"
