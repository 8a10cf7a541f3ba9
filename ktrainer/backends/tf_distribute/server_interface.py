"""Keep TensorFlow's server on one interface: loopback where no other host belongs to the cluster,
else the one that a launch over several hosts has chosen.

TensorFlow listens on all interfaces (`grpc_server_lib.cc` asks for "0.0.0.0").
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from ktrainer.config.cluster_environment import ClusterSpec
from ktrainer.config.launch_environment import LOOPBACK, NETWORK, listening_address
from ktrainer.distributed.listening_sockets import listens_at, narrow, on_all_interfaces

_POLL = 0.01  # seconds
_AFTER = 1.0  # seconds after the start


@contextmanager
def kept_on_interface(cluster: ClusterSpec) -> Iterator[None]:
    """Context in which TensorFlow starts the server of this process, kept on one interface.

    Its socket is moved as soon as it exists: TensorFlow may wait for other processes then. If the
    system does not allow it, the socket stays as it is.
    """
    if sys.platform != "linux" or not (all_on_loopback(cluster) or NETWORK in os.environ):
        yield
        return
    address = LOOPBACK if all_on_loopback(cluster) else listening_address()
    port, started = int(cluster.address.rpartition(":")[2]), threading.Event()
    if _is_kept(port, address):  # by an earlier Trainer of this process
        yield
        return

    def watch() -> None:
        until = None
        while until is None or time.monotonic() < until:
            with suppress(OSError, psutil.Error):  # a connection that TensorFlow has not accepted
                if narrow_port(port, address):
                    return
            if started.wait(_POLL) and until is None:
                until = time.monotonic() + _AFTER
            if until is not None:
                time.sleep(_POLL)

    thread = threading.Thread(target=watch, name="kept on interface", daemon=True)
    thread.start()
    try:
        yield
    finally:
        started.set()
        thread.join()


def _is_kept(port: int, address: str) -> bool:
    with suppress(OSError, psutil.Error):
        return listens_at(port, address)
    return False


def all_on_loopback(cluster: ClusterSpec) -> bool:
    """Return whether all addresses of a cluster are on the loopback interface."""
    hosts = {a.rpartition(":")[0] for addresses in cluster.jobs.values() for a in addresses}
    return all(host == "localhost" or host.startswith("127.") for host in hosts)


def narrow_port(port: int, address: str = LOOPBACK) -> bool:
    """Move listeners at `port` on all interfaces to one; return whether there were any."""
    moved = [narrow(listener, address) for listener in on_all_interfaces() if listener.port == port]
    return any(moved)
