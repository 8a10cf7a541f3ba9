"""Keep TensorFlow's server on the loopback interface, where no other host belongs to the cluster.

TensorFlow listens on all interfaces, and has no setting for that (`grpc_server_lib.cc` asks for
"0.0.0.0"). So the socket that it listens on is exchanged, under the same descriptor, for one on
127.0.0.1:

    the old socket listens, and is in the epoll instance of gRPC with some data
    a new one listens on 127.0.0.1 and the same port, beside it (SO_REUSEPORT)
    dup2 puts the new one in the place of the old one, which closes with its place in epoll
    the new one enters epoll with the same data, and gRPC notices nothing

At no moment does nobody listen. Linux tells what is in an epoll instance, with its data, in
/proc/self/fdinfo.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

from ktrainer.config.cluster import Cluster

_POLL = 0.01  # seconds
_WILDCARDS = ("0.0.0.0", "::")
_BACKLOG = 4096
_EPOLL_CTL_ADD = 1
_ENTRY = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+) data:\s*([0-9a-f]+)", re.MULTILINE)


class _Watched(NamedTuple):
    """An entry of an epoll instance."""

    instance: int
    events: int
    data: int


class _Event(ctypes.Structure):
    """`struct epoll_event`, which is packed on x86 and nowhere else."""

    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


@contextmanager
def kept_on_loopback(cluster: Cluster) -> Iterator[None]:
    """In which TensorFlow starts the server of this process.

    Its socket is moved as soon as it is there: TensorFlow may wait for other processes then. What
    the system does not allow is left as it is.
    """
    if sys.platform != "linux" or not all_on_loopback(cluster):
        yield
        return
    port, started = int(cluster.address.rpartition(":")[2]), threading.Event()

    def watch() -> None:
        with suppress(OSError, psutil.Error):
            while not narrow(port):
                if started.wait(_POLL):
                    narrow(port)
                    return

    thread = threading.Thread(target=watch, name="kept on loopback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        started.set()
        thread.join()


def all_on_loopback(cluster: Cluster) -> bool:
    """Whether all addresses of a cluster are of this host alone."""
    hosts = {a.rpartition(":")[0] for addresses in cluster.jobs.values() for a in addresses}
    return all(host == "localhost" or host.startswith("127.") for host in hosts)


def narrow(port: int) -> bool:
    """Move what listens at `port` on all interfaces, and is watched by epoll, to 127.0.0.1.

    Returns:
        Whether anything was moved.

    Raises:
        OSError: the system does not allow it; everything is as it was.
    """
    found = [
        (c.fd, watched)
        for c in psutil.Process().net_connections("inet")
        if c.status == psutil.CONN_LISTEN and (c.laddr.ip, c.laddr.port) in _at(port)
        if (watched := _watched(c.fd)) is not None
    ]
    for descriptor, watched in found:
        _exchange(descriptor, watched, port)
    return bool(found)


def _at(port: int) -> list[tuple[str, int]]:
    return [(address, port) for address in _WILDCARDS]


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


def _exchange(descriptor: int, watched: _Watched, port: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as old, socket.socket(old.family) as new:
        old.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for level, option in (
            (socket.SOL_SOCKET, socket.SO_REUSEADDR),
            (socket.SOL_SOCKET, socket.SO_REUSEPORT),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),  # this and the rest go to each connection
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ):
            new.setsockopt(level, option, old.getsockopt(level, option))
        if old.family == socket.AF_INET6:  # it takes IPv4 too
            new.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            new.bind(("::ffff:127.0.0.1", port))
        else:
            new.bind(("127.0.0.1", port))
        new.setblocking(False)
        new.listen(_BACKLOG)
        os.dup2(new.fileno(), descriptor, inheritable=False)
        event = _Event(watched.events, watched.data)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.epoll_ctl(watched.instance, _EPOLL_CTL_ADD, descriptor, ctypes.byref(event)) != 0:
            error = ctypes.get_errno()
            os.dup2(old.fileno(), descriptor, inheritable=False)  # which is in epoll still
            raise OSError(error, os.strerror(error))
