"""Keep the listening sockets of mpirun and its daemons on one interface.

mpirun waits for daemons of other hosts on all interfaces, and no setting of it says otherwise
(PRRTE 3 binds to INADDR_ANY in `oob_tcp_listener.c`). The sockets are moved right after mpirun has
opened them: a duplicate of a socket, taken with pidfd_getfd(2), is the same socket, and can be
closed and bound again. With all ranks on this host they move to 127.0.0.1, as no daemon ever
connects; with several hosts, to the address in the hosts' network, by

    python -m ktrainer.launch.mpirun_network NETWORK prted ARGUMENTS...

in the place of the daemon on each of them (a parent may take its child's sockets).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ktrainer.config.launch_environment import address_in
from ktrainer.launch.orphan_prevention import adopt_orphans

SAYS = "ktrainer run: "
_PIDFD_GETFD = 438
_WILDCARDS = ("0.0.0.0", "::")
_V6_LOOPBACK = "::1"
_POLL = 0.01
_NARROW_SECONDS = 10.0  # at most, to look for sockets of mpirun or a daemon
_WATCH_SECONDS = 1.0  # between two looks at mpirun, once some were found: one costs milliseconds
_AFTER_SECONDS = 1.0  # how long to look for more, once some were found
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


def narrow_listeners(pid: int, address: str = "127.0.0.1") -> bool:
    """Move a child's listening sockets from all interfaces to one, keeping their ports.

    Args:
        address: the IPv4 address to listen on. What listens by IPv6 moves to loopback: no daemon
            connects there.

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
            if _connected({port for _, _, port in sockets}):
                raise OSError("another host has connected already")
            for descriptor, everywhere, port in sockets:
                with _duplicate(handle, descriptor) as shared:
                    _stop_listening(shared)
                    shared.bind((_V6_LOOPBACK if ":" in everywhere else address, port))
                    shared.listen(_BACKLOG)
    finally:
        os.close(handle)
    return True


class ListenerWatch:
    """The listening sockets of mpirun, looked for at its start and kept on one interface.

    Args:
        pid: of mpirun, a child.
        address: the IPv4 address to listen on; None: they may listen on all interfaces.
    """

    def __init__(self, pid: int, address: str | None) -> None:
        self._pid, self._address = pid, address
        self._until = time.monotonic() + _NARROW_SECONDS
        self._found, self._next = False, 0.0

    @property
    def settled(self) -> bool:
        """Whether sockets were found, or none is looked for."""
        return self._found or self._address is None

    def narrow_when_due(self, now: float) -> str | None:
        """Look for sockets, if it is time to; return why they cannot be kept on the interface."""
        if self._address is None or not self._next <= now < self._until:
            return None
        try:
            self._found |= narrow_listeners(self._pid, self._address)
            if self._found:
                self._next = time.monotonic() + _WATCH_SECONDS
        except psutil.NoSuchProcess:
            pass
        except OSError as error:
            address, self._address = self._address, None
            return f"mpirun listens on all interfaces; cannot keep it on {address}: {error}"
        return None


def _connected(ports: set[int]) -> bool:
    """Return whether connections to these ports exist: with those they could not be bound again."""
    return any(
        c.status == psutil.CONN_ESTABLISHED and c.laddr and c.laddr.port in ports
        for c in psutil.net_connections("tcp")
    )


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


def _say_not_narrowed(name: str, address: str, error: OSError) -> None:
    """Print a line which the launcher shows, out of what mpirun prints."""
    text = f"{name} listens on all interfaces; cannot keep it on {address}: {error}"
    print(f"{SAYS}host {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    """Run a daemon of mpirun, and keep its sockets on the network that is named first."""
    network, *command = argv
    address, name = address_in(network), Path(command[0]).name
    adopt_orphans()  # the daemon may go into the background
    daemon = subprocess.Popen(command)
    until = time.monotonic() + _NARROW_SECONDS
    while (mine := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in mine:
            try:
                if process.name() == name and narrow_listeners(process.pid, address):
                    until = min(until, time.monotonic() + _AFTER_SECONDS)
            except psutil.NoSuchProcess:
                continue
            except OSError as error:
                _say_not_narrowed(name, address, error)
                return daemon.wait()
        time.sleep(_POLL)
    return daemon.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
