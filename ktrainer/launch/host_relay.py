"""Carry the pipes of ranks on other hosts to the launcher, over the remote agent's connection.

    launcher                                 host
    RankGroup <- RANK.out, .err, .say        RANK.out, .err, .say <- ranks, started by mpirun
          └──── HostRelays <──── frames ──── main() ┘
                           ────> environment, options, then signals

Every host has a private folder as the launcher has for a launch on one host. The environment, with
its secrets, comes on standard input and is kept there in a file for the owner alone; ranks read it
as they start. A relay that loses the launcher kills the ranks of its host.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import psutil

from ktrainer.errors import SetupError
from ktrainer.launch.hosts import Host, lost_hosts, python_command, silent_hosts
from ktrainer.launch.mpirun_command import available_cpus, cpu_slices
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.launch.rank_channel import (
    ENVIRONMENT,
    PIPES,
    Options,
    decode,
    fault_path,
    host_folder,
    pipe_path,
    prepare,
)

READY_SECONDS = 15.0
_CLOSE_SECONDS = 3.0  # for all relays to end, then for the rest of their output
_CHUNK = 1 << 16
_STACK_SECONDS = 0.3  # for a rank to write its stack
# Variables of a login or of MPI's own, which differ from host to host.
_OF_THE_HOST = (
    *("_", "DISPLAY", "HOME", "HOST", "HOSTNAME", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME"),
    *("MAIL", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TEMP", "TERM", "TMP", "TMPDIR", "USER"),
)
_OF_THE_HOST_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "SSH_", "XDG_")


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_THE_HOST and not name.startswith(_OF_THE_HOST_PREFIXES)
    }


class HostRelays:
    """The launcher's ends of all relays.

    Args:
        hosts: with the number of ranks on each, in the order of the ranks.
        agent: words of the remote agent.
        here: names of hosts that are this one, where no agent is needed.
        bind: give each rank its own processors, where they are enough for its threads.
        threads: of a rank.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        agent: Sequence[str],
        here: Sequence[str],
        *,
        bind: bool,
        threads: int,
    ) -> None:
        self.hosts, self._agent, self._here = hosts, agent, here
        self._bind = threads if bind else None
        self._relays: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._others = [host.name for host in hosts if host.name not in here]
        self._silent: list[str] = []
        names = [host.name for host in hosts for _ in range(host.slots)]
        self.host_of = dict(enumerate(names))

    def open(self, folder: Path, token: str, options: Options, env: Mapping[str, str]) -> None:
        """Start all relays, and wait until the ranks' pipes exist on every host.

        Args:
            folder: the launcher's, with pipes of its own that the relays' frames are written to.
            token: the name of this launch.

        Raises:
            SetupError: a relay does not start.
        """
        first, waits = 0, []
        for host in self.hosts:
            ranks = range(first, first + host.slots)
            first += host.slots
            command = python_command("ktrainer.launch.host_relay", token)
            here = host.name in self._here
            relay = subprocess.Popen(
                command if here else [*self._agent, host.name, shlex.join(command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                # A relay ends with its standard input, and removes its files.
                preexec_fn=None if here else end_with_parent,
            )
            self._relays.append(relay)
            request = {
                "ranks": list(ranks),
                "bind": self._bind,
                "options": asdict(replace(options, terminal_out=None, terminal_err=None)),
                "environment": travelling(env),
                "folders": [v for k, v in env.items() if k in _MPI_FOLDERS],
            }
            self._tell(relay, request)
            ready = threading.Event()
            waits.append((host, ready))
            self._receive(relay, folder, ranks, ready)
        until = time.monotonic() + READY_SECONDS
        self._silent = silent_hosts(self._others)
        for host, ready in waits:
            if not ready.wait(max(0.0, until - time.monotonic())):
                self.close()
                raise SetupError(
                    f"host {host.name}: ktrainer did not start there within {READY_SECONDS:g} s; "
                    "see what the remote agent printed above"
                )

    def lost(self) -> dict[int, str]:
        """Rank -> its host, for hosts that cannot be reached any more; see `lost_hosts`."""
        names = lost_hosts(self._others, self._agent, self._silent)
        return {rank: name for rank, name in self.host_of.items() if name in names}

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks, wherever they run; None: to all."""
        for relay in self._relays:
            self._tell(relay, {"signal": number, "ranks": ranks})

    def close(self) -> None:
        """End all relays, and what still runs on their hosts."""
        for relay in self._relays:
            assert relay.stdin is not None
            with contextlib.suppress(OSError):
                relay.stdin.close()
        until = time.monotonic() + _CLOSE_SECONDS
        for relay in self._relays:
            with contextlib.suppress(subprocess.TimeoutExpired):
                relay.wait(max(0.0, until - time.monotonic()))
            relay.kill()
            relay.wait()
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._relays, self._threads = [], []

    def _tell(self, relay: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
        assert relay.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            relay.stdin.write(json.dumps(message).encode() + b"\n")
            relay.stdin.flush()

    def _receive(
        self, relay: subprocess.Popen[bytes], folder: Path, ranks: range, ready: threading.Event
    ) -> None:
        """Write what a relay sends to the launcher's pipes, in a thread."""
        pipes = {
            (pipe, rank): os.open(pipe_path(folder, rank, pipe), os.O_WRONLY)
            for pipe in PIPES
            for rank in ranks
        }
        assert relay.stdout is not None
        stream = relay.stdout

        def receive() -> None:
            with contextlib.suppress(OSError, ValueError), stream:
                while header := stream.readline():
                    _handle_frame(header, stream, folder, pipes, ready)
            for opened in pipes.values():
                os.close(opened)

        thread = threading.Thread(target=receive, name="host relay", daemon=True)
        thread.start()
        self._threads.append(thread)


_MPI_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory")


def _handle_frame(
    header: bytes,
    stream: IO[bytes],
    folder: Path,
    pipes: dict[tuple[str, int], int],
    ready: threading.Event,
) -> None:
    words = header.split()
    if len(words) != 4 or words[0] != b"frame":
        return  # a greeting of the host's shell
    pipe, rank, size = words[1].decode(), int(words[2]), int(words[3])
    data = stream.read(size)
    if pipe == "ready":
        ready.set()
    elif pipe == "fault":
        fault_path(folder, rank).write_bytes(data)
    elif not size:
        os.close(pipes.pop((pipe, rank)))
    while data and (pipe, rank) in pipes:
        data = data[os.write(pipes[pipe, rank], data) :]


class _Relay:
    """The end on a host."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self._folder, self._ranks = folder, request["ranks"]
        self._pids: dict[int, int] = {}
        self._said = dict.fromkeys(self._ranks, b"")
        self._selector = selectors.DefaultSelector()
        options = Options(**request["options"])
        slices = cpu_slices(available_cpus(), len(self._ranks))
        if request["bind"] is not None and slices and request["bind"] <= len(slices[0]):
            options = replace(options, cpus=slices)
        prepare(folder, options.ranks, options)
        path = folder / ENVIRONMENT
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(request["environment"], file)
        for rank in self._ranks:
            for pipe in PIPES:
                opened = os.open(pipe_path(folder, rank, pipe), os.O_RDONLY | os.O_NONBLOCK)
                self._selector.register(opened, selectors.EVENT_READ, (pipe, rank))
        self._selector.register(0, selectors.EVENT_READ, ("stdin", -1))
        self._input = b""

    def run(self) -> None:
        """Carry everything until the launcher closes its end, then kill the ranks."""
        try:
            _send("ready", -1, b"")
            while self._step(None):
                pass
        finally:  # also where the launcher's end does not take output any more
            self._kill()
        self._selector.unregister(0)
        while self._step(0.0):  # all writers have ended: the rest of each pipe
            pass

    def _step(self, seconds: float | None) -> bool:
        """Handle what arrives within so many seconds; return whether there is more to come."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            pipe, rank = key.data
            with contextlib.suppress(BlockingIOError):
                data = os.read(key.fd, _CHUNK)
                if pipe != "stdin":
                    self._carry(key, pipe, rank, data)
                elif data:
                    self._obey(data)
                else:
                    return False
        return bool(ready)

    def _carry(self, key: selectors.SelectorKey, pipe: str, rank: int, data: bytes) -> None:
        if pipe == "say":
            *lines, self._said[rank] = (self._said[rank] + data).split(b"\n")
            for line in lines:
                if (note := decode(line)).event == "started":
                    self._pids[rank] = note.pid
        if not data:
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            if pipe == "say":
                self._send_fault(rank)
        _send(pipe, rank, data)

    def _obey(self, data: bytes) -> None:
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            ranks = self._ranks if message["ranks"] is None else message["ranks"]
            own = [rank for rank in ranks if rank in self._pids]
            for rank in own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], message["signal"])
            if message["signal"] == signal.SIGUSR2:
                time.sleep(_STACK_SECONDS)
                for rank in own:
                    self._send_fault(rank)

    def _send_fault(self, rank: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if data := fault_path(self._folder, rank).read_bytes():
                _send("fault", rank, data)

    def _kill(self) -> None:
        """Kill the ranks of this host, and their children."""
        for pid in self._pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()


def _send(pipe: str, rank: int, data: bytes) -> None:
    frame = b"frame %s %d %d\n" % (pipe.encode(), rank, len(data)) + data
    while frame:
        frame = frame[os.write(1, frame) :]


def main(token: str) -> None:
    """Be the relay of this host, for the launch of this name."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher's end of the connection ends this one
    request = json.loads(_first_line())
    folder = host_folder(token)
    folders = [Path(path) for path in request["folders"]]
    made = [path for path in folders if not path.exists()]
    try:
        folder.mkdir(mode=0o700)
        for path in made:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(BrokenPipeError):
            _Relay(folder, request).run()
    finally:
        for path in [folder, *made]:
            shutil.rmtree(path, ignore_errors=True)


def _first_line() -> bytes:
    """The first line of standard input, read without buffering what follows."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            sys.exit(1)
        line += byte
    return line


if __name__ == "__main__":
    main(sys.argv[1])
