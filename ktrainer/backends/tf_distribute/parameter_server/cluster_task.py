"""A task of a cluster that is not the coordinator: a worker or a parameter server.

Such tasks run the same script as the coordinator (the task `chief`) up to the Trainer, and serve
TensorFlow until the coordinator is done. TensorFlow itself waits for ever for a missing process,
and its servers never learn that the coordinator has ended. So before it starts TensorFlow, the
coordinator listens on its own address itself (see `liveness`):

    server or worker   {"job": "worker", "task": 1, ...}  ->  coordinator, then "." every second
    coordinator        "here"                             ->  each; then "done" at the end

Then TensorFlow takes over the address; the connections stay. A restarted worker finds TensorFlow
there instead: it polls whether the address still listens, and the coordinator probes it.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import NoReturn

import tensorflow as tf

from ktrainer.backends.tf_distribute.clusters import ClusterSpec, resolver
from ktrainer.backends.tf_distribute.parameter_server.liveness import (
    DONE,
    HEARTBEAT_SECONDS,
    HELLO_BYTES,
    HERE,
    POLL_SECONDS,
    reachable,
)
from ktrainer.backends.tf_distribute.server_interface import kept_on_interface
from ktrainer.distributed.cluster_world import host_and_port
from ktrainer.distributed.stack_dump import enable_stack_dumps
from ktrainer.errors import DeadlineExceeded, PeerLost

_LISTEN_POLL_SECONDS = 2.0
_LISTEN_POLLS = 3  # without success, until the coordinator counts as lost


def serve(cluster: ClusterSpec, start_timeout: float) -> NoReturn:
    """Serve as a worker or a parameter server until the coordinator is done, then exit.

    Args:
        cluster: which task this process is.
        start_timeout: seconds to wait for the coordinator.

    Raises:
        SystemExit: with 0 when the coordinator was done.
        DeadlineExceeded: it did not listen, or did not answer, in time.
        PeerLost: it has ended.
    """
    with kept_on_interface(cluster):
        server = tf.distribute.Server(
            resolver(cluster).cluster_spec(),
            job_name=cluster.job,
            task_index=cluster.task,
            protocol="grpc",
        )
    me = f"{cluster.job} {cluster.task}"
    said = _until_done(cluster, start_timeout, me)
    if not said.startswith(HERE):  # TensorFlow answers: this process was restarted
        _until_gone(cluster)
        sys.exit(0)
    del server
    if said.endswith(DONE):
        sys.exit(0)
    raise PeerLost(
        f"{me} lost the coordinator at {cluster.jobs['chief'][0]}: it has ended unexpectedly"
    )


def _until_done(cluster: ClusterSpec, start_timeout: float, me: str) -> bytes:
    """All that the coordinator's address sends until the coordinator is done or has ended."""
    hello = {"job": cluster.job, "task": cluster.task, "process": asdict(enable_stack_dumps())}
    deadline = time.monotonic() + start_timeout
    said = b""
    while not said:
        with _connect(cluster, deadline, start_timeout, me) as connection:
            with suppress(OSError):
                connection.sendall(json.dumps(hello).encode() + b"\n")
            said = _listen(connection, deadline)
        if not said:  # it has ended, or has not noticed yet that this task's last process has
            time.sleep(POLL_SECONDS)
    return said


def _ignore_first_signal() -> None:
    """Ignore the first SIGTERM or SIGINT: the coordinator receives it too, saves, for which it
    needs this process, and then says that it is done. The second one ends this process."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def first(_number: int, _frame: FrameType | None) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, first)


def _listen(connection: socket.socket, deadline: float) -> bytes:
    """All that the coordinator sends until it is done or has ended, with a heartbeat every second;
    empty if it sends nothing by `deadline`."""
    connection.settimeout(HEARTBEAT_SECONDS)
    said, heartbeat = b"", time.monotonic()
    while not said.endswith(DONE):
        try:
            data = connection.recv(HELLO_BYTES)
        except TimeoutError:
            data = None
        except OSError:
            break
        if data == b"" or not (data or said or time.monotonic() < deadline):
            break
        if data and not said:
            _ignore_first_signal()
        said += data or b""
        if not HERE.startswith(said[: len(HERE)]):
            break
        if said and time.monotonic() - heartbeat >= HEARTBEAT_SECONDS / 2:
            heartbeat = time.monotonic()
            with suppress(OSError):
                connection.sendall(b".")
    return said


def _until_gone(cluster: ClusterSpec) -> None:
    """Wait until the coordinator's address no longer listens."""
    failed = 0
    while failed < _LISTEN_POLLS:
        time.sleep(_LISTEN_POLL_SECONDS)
        failed = 0 if reachable(cluster.jobs["chief"][0]) else failed + 1


def _connect(cluster: ClusterSpec, deadline: float, seconds: float, me: str) -> socket.socket:
    """Connect to the coordinator by `deadline`, of `seconds` in all."""
    address = cluster.jobs["chief"][0]
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(host_and_port(address), timeout=1.0)
        except OSError:
            time.sleep(POLL_SECONDS)
    raise DeadlineExceeded(
        cluster.task,
        0,
        f"start of {me}",
        seconds,
        f"The coordinator at {address} does not listen, or does not answer. Is it started?",
        "backend.start_timeout",
    )
