"""The relay: a program on every host of a launch, which carries the pipes of its ranks.

    launcher                                 host
    HostConnections <──── frames ──── relay <- RANK.out, .err, .notes <- ranks
                    ────> messages ──>  └─ starts the ranks, where mpirun does not

Every host has a private folder as the launcher has for a launch on one host. The environment, with
its secrets, comes on standard input and is kept there in a file for the owner alone; ranks read it
as they start.

The relay and the launcher tell each other that they live (`LauncherConnection`). A relay that has
lost the connection ends the ranks of its host. So does one that has started them and has not heard
from the launcher for `SILENT_SECONDS`; they save a checkpoint first, if they can. What they print
from then on, and the reason, is in a file beside the folder; see `lost_launcher_path`.
"""

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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ktrainer.config.launch_environment import RELAYED
from ktrainer.errors import RUN_AGAIN
from ktrainer.launch.group_state import STACK_SIGNAL
from ktrainer.launch.launcher_connection import (
    BEAT_SECONDS,
    CHUNK,
    LauncherConnection,
    LauncherLostError,
)
from ktrainer.launch.rank_channel import (
    ENVIRONMENT,
    PIPES,
    Note,
    Options,
    decode,
    fault_path,
    host_folder,
    pipe_path,
    prepare,
)
from ktrainer.runtime.hardware import available_cpus, cpu_slices

_STACK_SECONDS = 0.3  # for a rank to write its stack
_GRACE_SECONDS = 30.0  # for ranks to end, unless they have said how long they need


class _Relay:
    """The relay of this host.

    Args:
        folder: for the ranks' pipes.
        request: the launcher's first message.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self._folder, self._request = folder, request
        self._ranks: list[int] = request["ranks"]
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._pids: dict[int, int] = {}
        self._grace: dict[int, float] = {}
        self._codes: list[int] = []  # of ranks that were asked to end, and did
        self._said = dict.fromkeys(self._ranks, b"")
        self._selector = selectors.DefaultSelector()
        self._prepare()
        self._selector.register(0, selectors.EVENT_READ, ("stdin", -1))
        starts_ranks = request["command"] is not None
        self._launcher = LauncherConnection(ends_by_silence=starts_ranks)

    def _prepare(self) -> None:
        options = Options(**self._request["options"])
        slices = cpu_slices(available_cpus(), len(self._ranks))
        bind = self._request["bind"]
        if bind is not None and slices and bind <= len(slices[0]):
            options = replace(options, cpus=slices)
        prepare(self._folder, options.ranks, options)
        path = self._folder / ENVIRONMENT
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(self._request["environment"], file)
        for rank in self._ranks:
            for pipe in PIPES:
                opened = os.open(pipe_path(self._folder, rank, pipe), os.O_RDONLY | os.O_NONBLOCK)
                self._selector.register(opened, selectors.EVENT_READ, (pipe, rank))

    def run(self) -> int:
        """Carry everything until the launcher wants the end or is lost, then end the ranks.

        Returns:
            75 if ranks saved a checkpoint after the launcher was lost, else 0.
        """
        try:
            self._launcher.send("ready", -1, b"")
            while not self._launcher.asked_to_end:
                self._step(BEAT_SECONDS)
                self._launcher.beat()
        except LauncherLostError as error:
            self._end_without_launcher(str(error))
        finally:
            self._kill()
        if not self._launcher.is_lost:
            self._selector.unregister(0)
        with contextlib.suppress(LauncherLostError):  # all writers have ended: the rest of pipes
            while self._step(0.0):
                pass
        return RUN_AGAIN if RUN_AGAIN in self._codes else 0

    def _step(self, seconds: float) -> bool:
        """Handle what arrives within so many seconds; return whether anything has."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            kind, rank = key.data
            if kind == "stdin":
                self._obey()
            elif kind == "end":
                self._report_end(key, rank)
            else:
                with contextlib.suppress(BlockingIOError):
                    self._carry(key, kind, rank, os.read(key.fd, CHUNK))
        return bool(ready)

    def _obey(self) -> None:
        for message in self._launcher.receive():
            if "start" in message:
                self._start(message["start"], message["environment"])
            elif "signal" in message:
                self._signal(message["signal"], message["ranks"])

    def _end_without_launcher(self, reason: str) -> None:
        """End the ranks after the launcher was lost; those that can save a checkpoint first."""
        self._selector.unregister(0)
        for process in self._started.values():
            process.terminate()
        self._launcher.lose(self._folder)
        self._launcher.log(
            f"host {socket.gethostname()} has lost the launcher: {reason}. If it lives, the run "
            "continues on its side; here all ranks end"
        )
        until = time.monotonic() + max(self._grace.values(), default=_GRACE_SECONDS)
        while self._started and time.monotonic() < until:
            self._step(BEAT_SECONDS)
        for rank in self._started:
            self._launcher.log(f"rank {rank} did not end in time, and was killed")

    def _start(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start a rank with the environment that MPI has made for it."""
        local = {"RANK": self._ranks.index(rank), "SIZE": len(self._ranks)}  # mpirun knows one host
        own = {f"OMPI_COMM_WORLD_LOCAL_{key}": str(value) for key, value in local.items()}
        process = subprocess.Popen(
            self._request["command"],
            env={**os.environ, **environment, **own, RELAYED: "1"},
            cwd=self._request["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=2,  # until it has its pipes; the other one is for frames
        )
        self._started[rank] = process
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, ("end", rank))

    def _report_end(self, key: selectors.SelectorKey, rank: int) -> None:
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        for other in list(self._selector.get_map().values()):
            if other.data == ("notes", rank):  # before its end: how it came about
                with contextlib.suppress(BlockingIOError):
                    self._carry(other, "notes", rank, os.read(other.fd, CHUNK))
        code = self._started.pop(rank).wait()
        self._pids.pop(rank, None)
        self._launcher.send("status", rank, b"%d" % (code << 8 if code >= 0 else -code))

    def _carry(self, key: selectors.SelectorKey, pipe: str, rank: int, data: bytes) -> None:
        if pipe == "notes":
            *lines, self._said[rank] = (self._said[rank] + data).split(b"\n")
            for line in lines:
                self._read_note(rank, decode(line))
        if not data:
            self._selector.unregister(key.fileobj)
            os.close(key.fd)
            if pipe == "notes":
                self._send_fault(rank)
        self._launcher.send(pipe, rank, data)

    def _read_note(self, rank: int, note: Note) -> None:
        if note.event == "started":
            if self._request["command"] is None or rank in self._started:
                self._pids[rank] = note.pid
        elif note.event == "grace":
            self._grace[rank] = note.seconds
        elif note.event in ("interrupted", "failed") and self._launcher.is_lost:
            self._codes.append(note.code)
            self._launcher.log(
                f"rank {rank} ended with exit code {note.code}: {note.text.rstrip()}"
            )

    def _signal(self, number: int, ranks: list[int] | None) -> None:
        # Only SIGKILL is for those that have not begun, too: they could not handle another one.
        pids = self._all_pids() if number == signal.SIGKILL else self._pids
        own = [rank for rank in (self._ranks if ranks is None else ranks) if rank in pids]
        for rank in own:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], number)
        if number == STACK_SIGNAL:
            time.sleep(_STACK_SECONDS)
            for rank in own:
                self._send_fault(rank)

    def _all_pids(self) -> dict[int, int]:
        """Rank -> process id, of those that have not begun too."""
        return self._pids | {rank: process.pid for rank, process in self._started.items()}

    def _send_fault(self, rank: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if data := fault_path(self._folder, rank).read_bytes():
                self._launcher.send("fault", rank, data)

    def _kill(self) -> None:
        """Kill the ranks of this host, and their children."""
        for pid in self._all_pids().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
        for started in self._started.values():
            started.wait()


def main(token: str) -> None:
    """Be the relay of this host, for the launch of this name."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # The launcher's end of the connection ends this one. Ranks do not inherit handlers.
        signal.signal(number, lambda *_: None)
    request = json.loads(_first_line())
    folder, code = host_folder(token), 1
    folders = [Path(path) for path in request["folders"]]
    made = [path for path in folders if not path.exists()]
    try:
        folder.mkdir(mode=0o700)
        for path in made:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        code = _Relay(folder, request).run()
    finally:
        for path in [folder, *made]:
            shutil.rmtree(path, ignore_errors=True)
    sys.exit(code)


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
