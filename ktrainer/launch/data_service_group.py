"""The processes of a tf.data service, from start to end."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ktrainer.config.data_service_file import TfDataServiceConfig, dispatcher_file
from ktrainer.errors import SetupError
from ktrainer.launch import orphan_prevention, process_tree
from ktrainer.launch.rank_output import LineMerger

RESTARTS = 20  # of each process
END_SECONDS = 5.0  # in which processes end after SIGTERM
_POLL = 0.1


@dataclass
class _Server:
    """One dispatcher or worker.

    Attributes:
        number: its line prefix.
        name: as messages call it.
        port: where it listens, also when it is started again.
        words: its arguments after the port.
        process: while it runs, or as it ended.
        restarts: how often it has been started again.
        dispatcher: the number of the dispatcher that it is, or computes for.
    """

    number: int
    name: str
    port: int
    words: list[str]
    dispatcher: int
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    @property
    def role(self) -> str:
        return self.name.split()[0]


@dataclass
class DataServiceGroup:
    """Dispatchers and workers on this host.

    A worker that fails is started again at the same address, where its readers find it. So is a
    dispatcher, if it keeps a journal; otherwise its end is that of the service.

    Args:
        config: how many of each; without addresses.
        path: the file to write once all of them listen, and to remove at the end.
        address: of this host, as training processes reach it.
        work_dir: folder of the dispatchers' journals; None: none.
        env: environment of the processes.
        out, err: where their lines go.
        signals: those that this process has received; grows while it waits.
        start_workers: starts the workers elsewhere, once the dispatchers listen; None: here.
    """

    config: TfDataServiceConfig
    path: Path
    address: str
    work_dir: Path | None
    env: Mapping[str, str]
    out: LineMerger
    err: LineMerger
    signals: list[int]
    start_workers: Callable[[TfDataServiceConfig], None] | None = None
    _servers: list[_Server] = field(default_factory=list)
    _known: dict[int, str] = field(default_factory=dict)  # dispatchers of the training side

    def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        orphan_prevention.adopt_orphans()
        with contextlib.closing(selectors.DefaultSelector()) as self._selector:
            try:
                self._start_all()
                self.config.write(self.path)
                self._say(f"ready; {self.path} says where. Ctrl-C or SIGTERM ends it")
                return self._watch()
            finally:
                self._remove_file()
                self._end()
                if self.work_dir is not None:
                    shutil.rmtree(self._journals, ignore_errors=True)

    def _remove_file(self) -> None:
        """Remove the file, unless it is that of another service by now."""
        with contextlib.suppress(SetupError):
            if TfDataServiceConfig.read(self.path).token == self.config.token:
                self.path.unlink(missing_ok=True)

    # -- start

    def _start_all(self) -> None:
        if self.config.dispatcher_side == "training":
            return
        ports = free_ports(self.config.dispatchers)
        for i, port in enumerate(ports):
            folder = ""
            if self.work_dir is not None:
                folder = str(self._journals / f"dispatcher-{i}")
                os.makedirs(folder)
            self._add(f"dispatcher {i}", port, [self.address, folder], i)
        addresses = tuple(f"{self.address}:{port}" for port in ports)
        self.config = replace(self.config, addresses=addresses)
        if self.start_workers is None:
            for i, address in enumerate(addresses):
                self._add_workers(i, address)
        self._wait_until_all_listen()
        if self.start_workers is not None:
            self.start_workers(self.config)

    @property
    def _journals(self) -> Path:
        """The folder of this service's journals: the next one has other addresses."""
        assert self.work_dir is not None
        return self.work_dir / f"service-{self.config.token}"

    def _add_workers(self, dispatcher: int, address: str) -> None:
        each = self.config.workers_per_dispatcher
        for i, port in enumerate(free_ports(each), dispatcher * each):
            self._add(f"worker {i}", port, [self.address, address], dispatcher)

    def _add(self, name: str, port: int, words: list[str], dispatcher: int) -> None:
        server = _Server(self._number(name), name, port, words, dispatcher)
        self._servers.append(server)
        self._start(server)

    def _number(self, name: str) -> int:
        role, _, index = name.partition(" ")
        first = (
            0
            if role == "dispatcher" or self.config.dispatcher_side == "training"
            else (self.config.dispatchers)
        )
        return first + int(index)

    def _start(self, server: _Server) -> None:
        module = "ktrainer.launch.data_service_process"
        server.process = subprocess.Popen(
            [sys.executable, "-m", module, server.role, str(server.port), *server.words],
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=orphan_prevention.end_with_parent,
        )
        streams = (server.process.stdout, server.process.stderr)
        for stream, merger in zip(streams, (self.out, self.err), strict=True):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (server.number, merger))

    def _wait_until_all_listen(self) -> None:
        end = time.monotonic() + self.config.timeout
        for server in self._servers:
            while not _listens(self.address, server.port):
                self._read()
                assert server.process is not None
                if (code := server.process.poll()) is not None:
                    self._read()
                    ended = process_tree.ending(code)
                    raise SetupError(f"{server.name} of the tf.data service {ended} at start")
                if self.signals:
                    return
                if time.monotonic() > end:
                    raise SetupError(
                        f"{server.name} of the tf.data service does not listen at {self.address}:"
                        f"{server.port} after {self.config.timeout:g} s. --address must be one of "
                        "this host; --deadline S waits longer"
                    )

    # -- while it runs

    def _watch(self) -> int:
        while not self.signals:
            self._read()
            if self.config.dispatcher_side == "training":
                self._follow_dispatchers()
            for server in list(self._servers):
                assert server.process is not None
                code = server.process.poll()
                if code is not None and not self._may_continue(server, code):
                    return code if code > 0 else 128 - code if code else 1
        number = self.signals[0]
        self._say(f"ends by {signal.Signals(number).name}")
        return 0 if number == signal.SIGTERM else 128 + number

    def _may_continue(self, server: _Server, code: int) -> bool:
        """Start a server that failed again, if its jobs survive that."""
        journal = server.role == "dispatcher" and bool(server.words[1])
        if server.restarts >= RESTARTS or not (server.role == "worker" or journal):
            hint = "; with --work-dir DIR it would be started again and its readers continue"
            reason = "" if server.role == "worker" else hint
            self._say(f"{server.name} {process_tree.ending(code)}: the service ends{reason}")
            return False
        self._say(f"{server.name} {process_tree.ending(code)}; starting it again")
        server.restarts += 1
        if server.role == "worker":
            self.config = replace(self.config, lost_workers=self.config.lost_workers + 1)
            self.config.write(self.path)
        self._start(server)
        return True

    def _follow_dispatchers(self) -> None:
        """Keep workers for those dispatchers that training processes have opened."""
        for i in range(self.config.dispatchers):
            try:
                address = json.loads(dispatcher_file(self.path, i).read_text())
            except FileNotFoundError:
                address = ""
            if address == self._known.get(i, ""):
                continue
            _stop(old := [s for s in self._servers if s.dispatcher == i])
            self._servers = [s for s in self._servers if s not in old]
            self._known[i] = address
            if address:
                self._say(f"dispatcher {i} at {address}: starting its workers")
                self._add_workers(i, address)

    def _read(self) -> None:
        if not self._selector.get_map():
            time.sleep(_POLL)
        for key, _ in self._selector.select(_POLL):
            number, merger = key.data
            data = os.read(key.fd, 1 << 16)
            if data:
                merger.feed(number, data)
            else:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]

    def _say(self, text: str) -> None:
        self.err.write_line(f"ktrainer data-service: {text}")

    def _end(self) -> None:
        _stop(self._servers)
        for _ in range(len(self._servers)):
            self._read()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.out.finish()
        self.err.finish()
        process_tree.end_all()


def _stop(servers: list[_Server]) -> None:
    """End servers: workers first, so that none reports the loss of its dispatcher."""
    running = [s.process for s in reversed(servers) if s.process is not None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    process_tree.wait_or_kill(running, END_SECONDS)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 1.0).close()
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    """Ports that are free on all interfaces, where TensorFlow's servers listen."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
