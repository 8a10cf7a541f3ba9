"""A program that mpirun starts in place of a rank, which another process starts.

    mpirun ── this program ┄┄ unix socket ┄┄ warm process ── rank
    mpirun ── this program ┄┄ unix socket ┄┄ launcher ┄┄ remote agent ┄┄ relay of a host ── rank

It hands over its environment and files, passes signals on to a rank of this host, and ends as the
rank does. If the other side ends before the rank, it ends as a rank that was killed. Where there is
no warm process it becomes the rank: it executes the rank's own COMMAND, if it has one.

Started as `python -I -S rank_stub.py SOCKET [COMMAND...]`. Standard library only, and little of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys

FILES = 3  # stdin, stdout and stderr
LENGTH = struct.Struct("!I")
_PR_SET_PDEATHSIG = 1
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")


def main(path: str, command: list[str]) -> None:
    """Stand for a rank, or become it."""
    try:
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(path)
        started = _hand_over(peer, command)
    except OSError:
        started = None
    if started is None and command:
        os.execv(command[0], command)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if started:
        for name in _PASSED_ON:
            signal.signal(getattr(signal, name), lambda number, _frame: _send(started, number))
    _end_as(receive(peer) if started is not None else None)


def _hand_over(peer: socket.socket, command: list[str]) -> int | None:
    """Ask for a rank; returns its process id, 0 on another host, None if there is no rank."""
    umask = os.umask(0)
    os.umask(umask)
    request = json.dumps([dict(os.environ), os.getcwd(), umask, command]).encode()
    socket.send_fds(peer, [LENGTH.pack(len(request))], list(range(FILES)))
    peer.sendall(request)
    return receive(peer)


def receive(peer: socket.socket) -> int | None:
    """A number from the other side; None if it has ended."""
    try:
        data = peer.recv(LENGTH.size, socket.MSG_WAITALL)
    except ConnectionError:
        return None
    return LENGTH.unpack(data)[0] if len(data) == LENGTH.size else None


def _send(group: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(group, number)


def _end_as(status: int | None) -> None:
    """End with a status of waitpid(2); None: the warm process was killed, and the rank with it."""
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)  # a signal that does not end a process by default


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
