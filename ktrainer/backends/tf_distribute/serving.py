"""The processes of a cluster with parameter servers.

Workers and servers run the same script as the coordinator (the task `chief`), as far as the
Trainer, and serve TensorFlow until the coordinator is done. TensorFlow itself waits for ever for
a process that is missing, and servers never learn that the coordinator has gone. So before it
starts TensorFlow, the coordinator listens on its own address itself (see `presence`):

    server or worker   {"job": "worker", "task": 1, ...}  ->  coordinator, then "." every second
    coordinator        "here"                             ->  each; then "done" at the end

Then TensorFlow takes the address over; the connections stay. A worker that has been started again
finds TensorFlow there instead: it looks from time to time whether somebody still listens, and the
coordinator asks it whether it is there.
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
from typing import Any, NoReturn

import tensorflow as tf

from ktrainer.backends.tf_distribute.clusters import Cluster, resolver
from ktrainer.backends.tf_distribute.loopback import kept_on_loopback
from ktrainer.backends.tf_distribute.presence import (
    BEAT,
    DONE,
    HELLO_BYTES,
    HERE,
    POLL,
    reachable,
)
from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.world.cluster import host_and_port
from ktrainer.world.stacks import answering

_LOOK = 2.0  # seconds
_LOOKS = 3  # in vain, until the coordinator is taken to have gone


def parameter_server_strategy(cluster: Cluster, min_shard_bytes: int | None) -> Any:
    """The coordinator's strategy.

    Args:
        cluster: all of whose processes are there.
        min_shard_bytes: larger variables are cut between the servers; None cuts none.
    """
    partitioner = None
    if min_shard_bytes is not None:
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes, max_shards=len(cluster.jobs["ps"])
        )
    return tf.distribute.ParameterServerStrategy(resolver(cluster), partitioner)


def serve(cluster: Cluster, start_timeout: float) -> NoReturn:
    """Serve as a worker or a parameter server until the coordinator is done, then exit.

    Args:
        cluster: which task this process is.
        start_timeout: seconds to wait for the coordinator.

    Raises:
        SystemExit: with 0 when the coordinator was done.
        DeadlineExceeded: it was not there, or said nothing, in time.
        PeerLost: it has gone.
    """
    with kept_on_loopback(cluster):
        server = tf.distribute.Server(
            resolver(cluster).cluster_spec(),
            job_name=cluster.job,
            task_index=cluster.task,
            protocol="grpc",
        )
    me = f"{cluster.job} {cluster.task}"
    said = _until_done(cluster, start_timeout, me)
    if not said.startswith(HERE):  # TensorFlow answers: this is not the first start
        _until_gone(cluster)
        sys.exit(0)
    del server
    if said.endswith(DONE):
        sys.exit(0)
    raise PeerLost(
        f"{me} lost the coordinator at {cluster.jobs['chief'][0]}: it has ended without a word"
    )


def _until_done(cluster: Cluster, start_timeout: float, me: str) -> bytes:
    """What is said at the coordinator's address until it is done or gone."""
    hello = {"job": cluster.job, "task": cluster.task, "process": asdict(answering())}
    deadline = time.monotonic() + start_timeout
    said = b""
    while not said:
        with _connect(cluster, deadline, start_timeout, me) as connection:
            with suppress(OSError):
                connection.sendall(json.dumps(hello).encode() + b"\n")
            said = _listen(connection, deadline)
        if not said:  # it has ended, or has not noticed yet that this task's last process has
            time.sleep(POLL)
    return said


def _leave_it_to_the_coordinator() -> None:
    """Whoever asks all processes to end asks the coordinator too. It saves, for which it needs
    this one, and then says that it is done. Asked a second time, this one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def first(_number: int, _frame: FrameType | None) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, first)


def _listen(connection: socket.socket, deadline: float) -> bytes:
    """What the coordinator says, until it is done or gone, with a sign of life every second;
    nothing if it has not begun by `deadline`."""
    connection.settimeout(BEAT)
    said, beaten = b"", time.monotonic()
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
            _leave_it_to_the_coordinator()
        said += data or b""
        if not HERE.startswith(said[: len(HERE)]):
            break
        if said and time.monotonic() - beaten >= BEAT / 2:
            beaten = time.monotonic()
            with suppress(OSError):
                connection.sendall(b".")
    return said


def _until_gone(cluster: Cluster) -> None:
    """Wait until nobody listens at the coordinator's address any more."""
    looks = 0
    while looks < _LOOKS:
        time.sleep(_LOOK)
        looks = 0 if reachable(cluster.jobs["chief"][0]) else looks + 1


def _connect(cluster: Cluster, deadline: float, seconds: float, me: str) -> socket.socket:
    """Connect to the coordinator by `deadline`, of `seconds` in all."""
    address = cluster.jobs["chief"][0]
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(host_and_port(address), timeout=1.0)
        except OSError:
            time.sleep(POLL)
    raise DeadlineExceeded(
        cluster.task,
        0,
        f"start of {me}",
        seconds,
        f"The coordinator at {address} was not there, or said nothing. Is it started?",
        "backend.start_timeout",
    )
