"""Which processes of a cluster with parameter servers are there, as its coordinator sees it.

Workers and servers connect before TensorFlow starts (see `serving`), and give a sign of life every
second. A worker that has been started again finds TensorFlow at the coordinator's address, and
nobody to connect to. So the coordinator asks it: TensorFlow's server answers whoever greets it in
its protocol, unless its process has stopped.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from contextlib import suppress

from ktrainer.backends.tf_distribute.clusters import Cluster
from ktrainer.world.cluster import host_and_port, listen_at, not_there
from ktrainer.world.stacks import Process, where_they_are

HERE, DONE = b"here\n", b"done\n"
POLL = 0.2  # seconds
BEAT, SILENCE = 1.0, 8.0  # seconds between signs of life, and without one
HELLO_BYTES = 1000
# The greeting of an HTTP/2 client, with empty settings; the server sends its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

Task = tuple[str, int]


class Presence:
    """Which workers and servers are there. Several threads may ask.

    Args:
        cluster: the coordinator's.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._expected = [(j, i) for j in ("worker", "ps") for i in range(len(cluster.jobs[j]))]
        self._here: dict[Task, socket.socket] = {}
        self._heard: dict[Task, float] = {}
        self._ended: dict[Task, Knock] = {}
        self._processes: dict[str, Process] = {}
        self._lock = threading.RLock()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every worker and server has said that it is there.

        Raises:
            DeadlineExceeded: naming those that have not, or have ended since.
        """
        deadline = time.monotonic() + seconds
        with listen_at(self._cluster.address) as listener:
            listener.settimeout(POLL)
            while missing := [task for task in self._expected if not self._is_here(task)]:
                with suppress(TimeoutError):
                    self._welcome(listener.accept()[0])
                self._listen()
                if time.monotonic() > deadline:
                    self.close()
                    raise not_there(0, self._describe(missing), seconds)

    def tasks(self, job: str) -> list[Task]:
        """The tasks of a job, there or not."""
        return [task for task in self._expected if task[0] == job]

    def missing(self, *jobs: str) -> str:
        """The tasks (of `jobs`; none: of all) that are not there now, with their addresses; empty
        if all are."""
        with self._lock:
            self._listen()
            ended = [task for task in self._ended if not jobs or task[0] in jobs]
        return self._describe([task for task in ended if not reachable(self._address(*task))])

    def silent(self, *jobs: str) -> str:
        """Those that have ceased to give signs of life, though they have not ended."""
        return self._describe([task for task in self._silent() if not jobs or task[0] in jobs])

    def where(self) -> str:
        """Lines on where the processes are that have ceased to give signs of life; if none has,
        on all that are there."""
        tasks = self._silent() or [task for task in self._expected if self._is_here(task)]
        return where_they_are(self._processes, [f"{job} {index}" for job, index in tasks])

    def close(self) -> None:
        """Tell all that the coordinator is done. May be called twice."""
        with self._lock:
            for connection in self._here.values():
                connection.settimeout(BEAT)
                with suppress(OSError):
                    connection.sendall(DONE)
                connection.close()
            for knock in self._ended.values():
                knock.close()
            self._here, self._ended, self._heard = {}, {}, {}

    def _is_here(self, task: Task) -> bool:
        return task in self._here and task not in self._ended

    def _silent(self) -> list[Task]:
        """Connected, and not heard of; or started again, and without an answer."""
        with self._lock:
            self._listen()
            now = time.monotonic()
            late = [
                t for t, at in self._heard.items() if t not in self._ended and now - at > SILENCE
            ]
            for task, knock in self._ended.items():
                if knock.waits() > SILENCE:
                    late.append(task)
            return late

    def _listen(self) -> None:
        """Take what has arrived from each task."""
        with self._lock:
            for task, connection in self._here.items():
                if task in self._ended:
                    continue
                connection.setblocking(False)
                try:
                    while data := connection.recv(HELLO_BYTES):
                        self._heard[task] = time.monotonic()
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self._ended[task] = Knock(self._address(*task))
                    # The process that is started in its place is another.
                    self._processes.pop(f"{task[0]} {task[1]}", None)

    def _welcome(self, connection: socket.socket) -> None:
        task, process = _hello(connection)
        if task is None or task not in self._expected or self._is_here(task):
            connection.close()
            return
        try:
            connection.sendall(HERE)
        except OSError:  # it has ended since
            connection.close()
            return
        if task in self._here:
            self._here[task].close()
        self._ended.pop(task, None)
        self._here[task] = connection
        if process is not None:
            self._processes[f"{task[0]} {task[1]}"] = process
        self._heard[task] = time.monotonic()

    def _address(self, job: str, index: int) -> str:
        return self._cluster.jobs[job][index]

    def _describe(self, tasks: list[Task]) -> str:
        return ", ".join(f"{j} {i} ({self._address(j, i)})" for j, i in tasks)


class Knock:
    """Asks again and again whether TensorFlow answers at an address, without waiting for it.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        self._address = host_and_port(address)
        self._socket: socket.socket | None = None
        self._asked = 0.0
        self._greeted = False

    def waits(self) -> float:
        """Seconds for which somebody there has not answered; 0.0 if it has, or nobody is there."""
        now = time.monotonic()
        if self._socket is None:
            if now - self._asked < BEAT:
                return 0.0
            self._asked, self._greeted = now, False
            self._socket = _connecting(self._address)
        if self._socket is None:
            return 0.0
        try:
            if not self._greeted:
                self._socket.sendall(_PREFACE)
                self._asked, self._greeted = now, True
            self._socket.recv(HELLO_BYTES)
        except BlockingIOError:
            return now - self._asked if self._greeted else 0.0
        except OSError:  # nobody listens
            pass
        self.close()
        return 0.0

    def close(self) -> None:
        """Let go of the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _connecting(address: tuple[str, int]) -> socket.socket | None:
    """A socket on its way there; None if there is no way."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setblocking(False)
        found.connect_ex(place)
    except OSError:
        return None
    return found


def reachable(address: str) -> bool:
    """Whether somebody listens there."""
    try:
        with socket.create_connection(host_and_port(address), timeout=1.0):
            return True
    except OSError:
        return False


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
        values = json.loads(connection.recv(HELLO_BYTES))
        return (str(values["job"]), int(values["task"])), Process(**values["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
