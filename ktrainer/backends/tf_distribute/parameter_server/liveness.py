"""Liveness of the workers and parameter servers of a cluster, as its coordinator sees it.

Workers and servers connect before TensorFlow starts (see `cluster_task`), and send a heartbeat
every second. A restarted worker finds TensorFlow at the coordinator's address and cannot connect,
so the coordinator probes it: TensorFlow's server answers the greeting of its protocol, unless its
process has stopped.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from contextlib import suppress

from ktrainer.backends.tf_distribute.clusters import ClusterSpec
from ktrainer.distributed.cluster_world import absent_error, host_and_port, listen_at
from ktrainer.distributed.stack_dump import Process, stack_dumps

HERE, DONE = b"here\n", b"done\n"
POLL_SECONDS = 0.2
HEARTBEAT_SECONDS, SILENCE_SECONDS = 1.0, 8.0  # between heartbeats, and without one
HELLO_BYTES = 1000
# The greeting of an HTTP/2 client, with empty settings; the server sends its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

Task = tuple[str, int]


class Liveness:
    """The workers and servers that are connected, alive, or lost. Thread-safe.

    Args:
        cluster: the coordinator's.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._expected = [(j, i) for j in ("worker", "ps") for i in range(len(cluster.jobs[j]))]
        self._connected: dict[Task, socket.socket] = {}
        self._last_heartbeat: dict[Task, float] = {}
        self._ended: dict[Task, Probe] = {}
        self._processes: dict[str, Process] = {}
        self._lock = threading.RLock()

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every worker and server has connected.

        Raises:
            DeadlineExceeded: naming those that have not, or have ended since.
        """
        deadline = time.monotonic() + seconds
        with listen_at(self._cluster.address) as listener:
            listener.settimeout(POLL_SECONDS)
            while missing := [task for task in self._expected if not self._is_connected(task)]:
                with suppress(TimeoutError):
                    self._accept(listener.accept()[0])
                self._listen()
                if time.monotonic() > deadline:
                    self.close()
                    raise absent_error(0, self._describe(missing), seconds)

    def tasks(self, job: str) -> list[Task]:
        """The tasks of a job, connected or not."""
        return [task for task in self._expected if task[0] == job]

    def missing(self, *jobs: str) -> str:
        """The tasks (of `jobs`; default: of all) that are lost, with their addresses."""
        with self._lock:
            self._listen()
            ended = [task for task in self._ended if not jobs or task[0] in jobs]
        return self._describe([task for task in ended if not reachable(self._address(*task))])

    def silent(self, *jobs: str) -> str:
        """The tasks that have stopped sending heartbeats, though they have not ended."""
        return self._describe([task for task in self._silent() if not jobs or task[0] in jobs])

    def stack_dumps(self) -> str:
        """Stack dumps of the silent processes; if there are none, of all that are connected."""
        tasks = self._silent() or [task for task in self._expected if self._is_connected(task)]
        return stack_dumps(self._processes, [f"{job} {index}" for job, index in tasks])

    def close(self) -> None:
        """Tell all tasks that the coordinator is done. May be called twice."""
        with self._lock:
            for connection in self._connected.values():
                connection.settimeout(HEARTBEAT_SECONDS)
                with suppress(OSError):
                    connection.sendall(DONE)
                connection.close()
            for probe in self._ended.values():
                probe.close()
            self._connected, self._ended, self._last_heartbeat = {}, {}, {}

    def _is_connected(self, task: Task) -> bool:
        return task in self._connected and task not in self._ended

    def _silent(self) -> list[Task]:
        """Tasks that are connected without heartbeats, or restarted without answering a probe."""
        with self._lock:
            self._listen()
            now = time.monotonic()
            late = [
                t
                for t, at in self._last_heartbeat.items()
                if t not in self._ended and now - at > SILENCE_SECONDS
            ]
            for task, probe in self._ended.items():
                if probe.waits() > SILENCE_SECONDS:
                    late.append(task)
            return late

    def _listen(self) -> None:
        """Receive what has arrived from each task."""
        with self._lock:
            for task, connection in self._connected.items():
                if task in self._ended:
                    continue
                connection.setblocking(False)
                try:
                    while data := connection.recv(HELLO_BYTES):
                        self._last_heartbeat[task] = time.monotonic()
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data:
                    self._ended[task] = Probe(self._address(*task))
                    # The process that replaces it is another.
                    self._processes.pop(f"{task[0]} {task[1]}", None)

    def _accept(self, connection: socket.socket) -> None:
        task, process = _hello(connection)
        if task is None or task not in self._expected or self._is_connected(task):
            connection.close()
            return
        try:
            connection.sendall(HERE)
        except OSError:  # it has ended since
            connection.close()
            return
        if task in self._connected:
            self._connected[task].close()
        self._ended.pop(task, None)
        self._connected[task] = connection
        if process is not None:
            self._processes[f"{task[0]} {task[1]}"] = process
        self._last_heartbeat[task] = time.monotonic()

    def _address(self, job: str, index: int) -> str:
        return self._cluster.jobs[job][index]

    def _describe(self, tasks: list[Task]) -> str:
        return ", ".join(f"{j} {i} ({self._address(j, i)})" for j, i in tasks)


class Probe:
    """Checks repeatedly whether TensorFlow answers at an address, without blocking.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        self._address = host_and_port(address)
        self._socket: socket.socket | None = None
        self._asked = 0.0
        self._greeted = False

    def waits(self) -> float:
        """Seconds since an unanswered greeting; 0.0 if it was answered, or nothing listens."""
        now = time.monotonic()
        if self._socket is None:
            if now - self._asked < HEARTBEAT_SECONDS:
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
        except OSError:  # nothing listens
            pass
        self.close()
        return 0.0

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _connecting(address: tuple[str, int]) -> socket.socket | None:
    """A socket that is connecting to an address; None if there is no route."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind)
        found.setblocking(False)
        found.connect_ex(place)
    except OSError:
        return None
    return found


def reachable(address: str) -> bool:
    """Return whether a socket listens at an address."""
    try:
        with socket.create_connection(host_and_port(address), timeout=1.0):
            return True
    except OSError:
        return False


_liveness: Liveness | None = None


def wait_for_cluster(cluster: ClusterSpec, start_timeout: float) -> Liveness:
    """The liveness of the cluster once all tasks are connected; one object until this process ends.

    Raises:
        DeadlineExceeded: some did not connect in time.
    """
    global _liveness
    if _liveness is None:
        liveness = Liveness(cluster)
        liveness.wait_for_all(start_timeout)
        atexit.register(liveness.close)
        _liveness = liveness
    return _liveness


def _hello(connection: socket.socket) -> tuple[Task | None, Process | None]:
    """The task that has connected, and its process; None if it does not say so in a second."""
    connection.settimeout(1.0)
    try:
        values = json.loads(connection.recv(HELLO_BYTES))
        return (str(values["job"]), int(values["task"])), Process(**values["process"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None
