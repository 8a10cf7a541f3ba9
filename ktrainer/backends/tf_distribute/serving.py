"""The processes of a cluster with parameter servers, and who of them is there.

Workers and servers run the same script as the coordinator (the task `chief`), as far as the
Trainer, and serve TensorFlow until the coordinator is done. TensorFlow itself waits for ever for
a process that is missing, and servers never learn that the coordinator has gone. So before it
starts TensorFlow, the coordinator listens on its own address itself:

    server or worker   {"job": "worker", "task": 1, ...}  ->  coordinator, then "." every second
    coordinator        "here"                             ->  each; then "done" at the end

Then TensorFlow takes the address over; the connections stay. A worker that has been started again
finds TensorFlow there instead: it looks from time to time whether somebody still listens.
"""

from __future__ import annotations

import atexit
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
from ktrainer.errors import DeadlineExceeded, PeerLost
from ktrainer.world.cluster import host_and_port, listen_at, not_there
from ktrainer.world.stacks import Process, answering, where_they_are

_HERE, _DONE = b"here\n", b"done\n"
_POLL = 0.2  # seconds
_BEAT, SILENCE = 1.0, 8.0  # seconds between signs of life, and without one
_LOOK = 2.0  # seconds
_LOOKS = 3  # in vain, until the coordinator is taken to have gone
_HELLO_BYTES = 1000

Task = tuple[str, int]


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
        DeadlineExceeded: it was not there in time.
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
    with _connect(cluster, start_timeout, me) as connection:
        hello = {"job": cluster.job, "task": cluster.task, "process": asdict(answering())}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        _leave_it_to_the_coordinator()
        said = _listen(connection)
    if not said.startswith(_HERE):  # TensorFlow answers: this is not the first start
        _until_gone(cluster)
        sys.exit(0)
    del server
    if said.endswith(_DONE):
        sys.exit(0)
    raise PeerLost(
        f"{me} lost the coordinator at {cluster.jobs['chief'][0]}: it has ended without a word"
    )


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


def _listen(connection: socket.socket) -> bytes:
    """What the coordinator says, until it is done or gone, with a sign of life every second."""
    connection.settimeout(_BEAT)
    said, beaten = b"", time.monotonic()
    while not said.endswith(_DONE):
        try:
            data = connection.recv(_HELLO_BYTES)
        except TimeoutError:
            data = None
        except OSError:
            break
        if data == b"":
            break
        said += data or b""
        if not _HERE.startswith(said[: len(_HERE)]):
            break
        if said and time.monotonic() - beaten >= _BEAT / 2:
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


def reachable(address: str) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection(host_and_port(address), timeout=1.0):
            return True
    except OSError:
        return False


def _connect(cluster: Cluster, seconds: float, me: str) -> socket.socket:
    address = cluster.jobs["chief"][0]
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(host_and_port(address), timeout=1.0)
        except OSError:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    cluster.task,
                    0,
                    f"start of {me}",
                    seconds,
                    f"The coordinator at {address} was not there. Start it, or raise "
                    "backend.start_timeout.",
                ) from None
            time.sleep(_POLL)


class Presence:
    """Which workers and servers are there, as the coordinator sees it.

    Args:
        cluster: the coordinator's.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._expected = [(j, i) for j in ("worker", "ps") for i in range(len(cluster.jobs[j]))]
        self._here: dict[Task, socket.socket] = {}
        self._heard: dict[Task, float] = {}
        self._ended: set[Task] = set()
        self._processes: dict[str, Process] = {}

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every worker and server has said that it is there.

        Raises:
            DeadlineExceeded: naming those that have not.
        """
        deadline = time.monotonic() + seconds
        with listen_at(self._cluster.address) as listener:
            listener.settimeout(_POLL)
            while missing := [task for task in self._expected if task not in self._here]:
                with suppress(TimeoutError):
                    self._welcome(listener.accept()[0])
                if time.monotonic() > deadline:
                    self.close()
                    raise not_there(0, self._describe(missing), seconds)

    def tasks(self, job: str) -> list[Task]:
        """The tasks of a job, there or not."""
        return [task for task in self._expected if task[0] == job]

    def missing(self) -> str:
        """The tasks that are not there now, with their addresses; empty if all are."""
        self._hear()
        return self._describe([t for t in self._ended if not reachable(self._address(*t))])

    def silent(self) -> str:
        """The tasks that have ceased to give signs of life, though they have not ended."""
        self._hear()
        return self._describe(self._silent())

    def where(self) -> str:
        """Lines on where the processes are that have ceased to give signs of life; if none has,
        on all that are there."""
        self._hear()
        tasks = self._silent() or [task for task in self._heard if task not in self._ended]
        return where_they_are(self._processes, [f"{job} {index}" for job, index in tasks])

    def _silent(self) -> list[Task]:
        late = time.monotonic() - SILENCE
        return [t for t, at in self._heard.items() if t not in self._ended and at < late]

    def _hear(self) -> None:
        """Take what has arrived from each task."""
        for task, connection in self._here.items():
            connection.setblocking(False)
            try:
                while data := connection.recv(_HELLO_BYTES):
                    self._heard[task] = time.monotonic()
                if not data:
                    self._ended.add(task)
            except BlockingIOError:
                continue
            except OSError:
                self._ended.add(task)

    def close(self) -> None:
        """Tell all that the coordinator is done. May be called twice."""
        for connection in self._here.values():
            connection.settimeout(_BEAT)
            with suppress(OSError):
                connection.sendall(_DONE)
            connection.close()
        self._here = {}

    def _welcome(self, connection: socket.socket) -> None:
        task, process = _hello(connection)
        if task is None or task not in self._expected or task in self._here:
            connection.close()
            return
        connection.sendall(_HERE)
        self._here[task] = connection
        if process is not None:
            self._processes[f"{task[0]} {task[1]}"] = process
        self._heard[task] = time.monotonic()

    def _address(self, job: str, index: int) -> str:
        return self._cluster.jobs[job][index]

    def _describe(self, tasks: list[Task]) -> str:
        return ", ".join(f"{j} {i} ({self._address(j, i)})" for j, i in tasks)


_presence: Presence | None = None


def present(cluster: Cluster, start_timeout: float) -> Presence:
    """Who of the cluster is there, once all are; until this process ends.

    Raises:
        DeadlineExceeded: some were not there in time.
    """
    global _presence
    if _presence is None:
        presence = Presence(cluster)
        presence.wait_for_all(start_timeout)
        atexit.register(presence.close)
        _presence = presence
    return _presence


def _hello(connection: socket.socket) -> tuple[Task | None, Process | None]:
    """The task that has connected, and its process; None if it does not say so in a second."""
    connection.settimeout(1.0)
    try:
        values = json.loads(connection.recv(_HELLO_BYTES))
        return (str(values["job"]), int(values["task"])), Process(**values["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
