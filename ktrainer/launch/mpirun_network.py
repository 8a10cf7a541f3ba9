"""Keep mpirun's own listening sockets on the loopback interface.

mpirun waits for daemons of other hosts on all interfaces, and no setting of it says otherwise
(PRRTE 3 binds to INADDR_ANY in `oob_tcp_listener.c`). With all ranks on this host no daemon ever
connects, so the sockets are moved to 127.0.0.1 right after mpirun has opened them: a duplicate of a
socket, taken with pidfd_getfd(2), is the same socket, and can be closed and bound again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterator

import psutil

_PIDFD_GETFD = 438
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_BACKLOG = 128


def listening_everywhere(pid: int) -> list[tuple[int, str, int]]:
    """`(descriptor, address, port)` of a process's listening sockets that are on all interfaces."""
    try:
        connections = psutil.Process(pid).net_connections("inet")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
    return [
        (c.fd, c.laddr.ip, c.laddr.port)
        for c in connections
        if c.status == psutil.CONN_LISTEN and c.laddr.ip in _WILDCARDS
    ]


def narrow_to_loopback(pid: int) -> bool:
    """Move a child's listening sockets from all interfaces to loopback, keeping their ports.

    Returns:
        Whether any was moved.

    Raises:
        OSError: the kernel does not allow it (some containers), or is older than Linux 5.6.
    """
    sockets = listening_everywhere(pid)
    if not sockets:
        return False
    if sys.platform != "linux":
        raise OSError("needs Linux")
    handle = os.pidfd_open(pid)
    try:
        # Were it running, it could find the socket closed and print a warning.
        with _stopped(pid):
            for descriptor, address, port in sockets:
                with _duplicate(handle, descriptor) as shared:
                    _stop_listening(shared)
                    shared.bind((_WILDCARDS[address], port))
                    shared.listen(_BACKLOG)
    finally:
        os.close(handle)
    return True


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    process = psutil.Process(pid)
    process.suspend()
    try:
        deadline = time.monotonic() + 1.0
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.001)
        yield
    finally:
        process.resume()


def _duplicate(handle: int, descriptor: int) -> socket.socket:
    number = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, descriptor, 0)
    if number < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return socket.socket(fileno=number)


def _stop_listening(listener: socket.socket) -> None:
    """Disconnect by connect(2) to an address of family AF_UNSPEC, which `socket` cannot express."""
    nowhere = ctypes.create_string_buffer(16)
    if ctypes.CDLL(None, use_errno=True).connect(listener.fileno(), nowhere, len(nowhere)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
