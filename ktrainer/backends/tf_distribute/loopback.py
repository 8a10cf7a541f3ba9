"""Keep TensorFlow's server on the loopback interface, where no other host belongs to the cluster.

TensorFlow listens on all interfaces (`grpc_server_lib.cc` asks for "0.0.0.0").
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from ktrainer.config.cluster import Cluster
from ktrainer.world.listening import narrow, on_all_interfaces

_POLL = 0.01  # seconds
_AFTER = 1.0  # seconds after the start


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
        until = None
        while until is None or time.monotonic() < until:
            with suppress(OSError, psutil.Error):  # one has called whom TensorFlow has not heard
                if narrow_port(port):
                    return
            if started.wait(_POLL) and until is None:
                until = time.monotonic() + _AFTER
            if until is not None:
                time.sleep(_POLL)

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


def narrow_port(port: int) -> bool:
    """Move what listens at `port` on all interfaces to loopback; whether there was anything."""
    moved = [narrow(listener) for listener in on_all_interfaces() if listener.port == port]
    return any(moved)
