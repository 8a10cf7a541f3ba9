"""Keep listening sockets that a library has opened on all interfaces on one: loopback, or the
interface of a launch over several hosts.

TensorFlow and MPI have no setting for that: they ask for "0.0.0.0". So the socket is replaced,
under the same descriptor, by one on 127.0.0.1 (or ::1):

    the old socket listens, and is in the library's epoll instance with some data
    a new one listens on that address and the same port, beside it (SO_REUSEPORT)
    dup2 puts the new one in the place of the old one, which closes with its place in epoll
    the new one enters epoll with the same data, and the library notices nothing

One of the two listens at every moment. A connection that waits for the library to accept it would
close with the old socket: then all is left as it was, for another try. Linux lists what is in an
epoll instance, with its data, in /proc/self/fdinfo.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

from ktrainer.config.launch_environment import LOOPBACK

_WILDCARDS = ("0.0.0.0", "::")
_MAPPED = "::ffff:"  # an IPv4 address as one of IPv6 begins so
_BACKLOG = 4096
_POLL_SECONDS = 0.02
_ACCEPT_SECONDS = 0.2  # for the library to accept what came before the new socket was opened
_HANDSHAKE_SECONDS = 0.005  # for one that had begun when the new socket was opened
_UNACKED = slice(24, 28)  # in `struct tcp_info`
_EPOLL_CTL_ADD = 1
_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)


class ListeningSocket(NamedTuple):
    """A socket of this process that listens on all interfaces."""

    descriptor: int
    port: int


class _Watched(NamedTuple):
    """An entry of an epoll instance."""

    instance: int
    events: int
    data: int


class _Event(ctypes.Structure):
    """`struct epoll_event`, which is packed on x86 and nowhere else."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


def on_all_interfaces() -> list[ListeningSocket]:
    """The sockets of this process that listen on all interfaces."""
    return [ListeningSocket(c.fd, c.laddr.port) for c in _listening() if c.laddr.ip in _WILDCARDS]


def listens_at(port: int, address: str) -> bool:
    """Whether this process listens at a port of an IPv4 address, and not on all interfaces."""
    places = {c.laddr.ip.removeprefix(_MAPPED) for c in _listening() if c.laddr.port == port}
    return address in places and places.isdisjoint(_WILDCARDS)


def _listening() -> list[Any]:
    connections = psutil.Process().net_connections("inet")
    return [each for each in connections if each.status == psutil.CONN_LISTEN]


def narrow_at(
    ports: Container[int],
    address: str = LOOPBACK,
    accept_pending: Callable[[], object] = lambda: None,
) -> bool:
    """Move what listens at these ports on all interfaces to an IPv4 address.

    Args:
        accept_pending: makes a library without a thread of its own accept connections.

    Returns:
        Whether that succeeded. The system does not allow it while an incoming connection has not
        been accepted by the library.
    """
    try:
        found = [each for each in on_all_interfaces() if each.port in ports]
        moved = [narrow(each, address, accept_pending) for each in found]
    except (OSError, psutil.Error):
        return False
    return all(moved)


def keep_at(
    address: str,
    ports: Container[int],
    accept_pending: Callable[[], object] = lambda: None,
    seconds: float = 3.0,
) -> bool:
    """`narrow_at`, tried again between two incoming connections.

    Args:
        address: of this host, as others know it: a name or an IPv4 address.
        accept_pending: see `narrow_at`.
        seconds: how long to try.
    """
    until = time.monotonic() + seconds
    try:
        here = socket.gethostbyname(address)
    except OSError:
        return False
    while not narrow_at(ports, here, accept_pending):
        if time.monotonic() > until:
            return False
        accept_pending()
        time.sleep(_POLL_SECONDS)
    return True


def narrow(
    listener: ListeningSocket,
    address: str = LOOPBACK,
    accept_pending: Callable[[], object] = lambda: None,
) -> bool:
    """Move a socket that is watched by epoll to an IPv4 address; one for IPv6 alone to loopback.

    Args:
        accept_pending: see `narrow_at`.

    Returns:
        Whether it was moved: False if it is not watched.

    Raises:
        OSError: the system does not allow it; everything is as it was.
    """
    watched = _watched(listener.descriptor)
    if watched is None:
        return False
    _exchange(listener, watched, address, accept_pending)
    return True


def _watched(descriptor: int) -> _Watched | None:
    """The entry of a descriptor in an epoll instance of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as file:
                for number, events, data in _ENTRY.findall(file.read()):
                    if int(number) == descriptor:
                        return _Watched(int(name), int(events, 16), int(data, 16))
    return None


def _exchange(
    listener: ListeningSocket,
    watched: _Watched,
    address: str,
    accept_pending: Callable[[], object],
) -> None:
    descriptor = listener.descriptor
    with socket.socket(fileno=os.dup(descriptor)) as old, socket.socket(old.family) as new:
        for shared in _at_port(listener.port):  # connections that came in keep the port, too
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.close()
        for level, option in (
            (socket.SOL_SOCKET, socket.SO_REUSEADDR),
            (socket.SOL_SOCKET, socket.SO_REUSEPORT),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),  # this and the rest go to each connection
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ):
            new.setsockopt(level, option, old.getsockopt(level, option))
        new.bind((_narrowed(old, new, address), listener.port))
        new.setblocking(os.get_blocking(descriptor))
        if _waiting(old):  # checked twice: what comes from now on comes to the new one
            raise OSError(errno.EBUSY, "a connection waits to be accepted")
        new.listen(_BACKLOG)
        time.sleep(_HANDSHAKE_SECONDS)
        until = time.monotonic() + _ACCEPT_SECONDS
        while _waiting(old):  # for a thread of the library
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "a connection waits to be accepted")
            accept_pending()
            time.sleep(_HANDSHAKE_SECONDS)
        os.dup2(new.fileno(), descriptor, inheritable=False)
        event = _Event(watched.events, watched.data)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.epoll_ctl(watched.instance, _EPOLL_CTL_ADD, descriptor, ctypes.byref(event)) != 0:
            error = ctypes.get_errno()
            os.dup2(old.fileno(), descriptor, inheritable=False)  # which is in epoll still
            raise OSError(error, os.strerror(error))


def _waiting(listener: socket.socket) -> int:
    """The number of connections that wait to be accepted: `tcpi_unacked` of a listening socket."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.stop)
    return int.from_bytes(info[_UNACKED.start :], sys.byteorder)


def _at_port(port: int) -> Iterator[socket.socket]:
    """Duplicates of this process's sockets at a port."""
    for c in psutil.Process().net_connections("inet"):
        if c.fd >= 0 and c.laddr and c.laddr.port == port:
            yield socket.socket(fileno=os.dup(c.fd))


def _narrowed(old: socket.socket, new: socket.socket, address: str) -> str:
    """The address for `new`: of the versions of IP that `old` accepts."""
    if old.family != socket.AF_INET6:
        return address
    alone = old.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
    return "::1" if alone else f"{_MAPPED}{address}"
