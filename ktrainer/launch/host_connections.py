"""The launcher's connections to the hosts of its ranks, over the remote agent.

    launcher                                      host
    RankGroup <- RANK.out, .err, .notes           RANK.out, .err, .notes <- ranks
          └──── HostConnections <──── frames ──── host_relay ┘
                                ────> environment, options, then signals

mpirun starts the ranks through daemons of its own on the hosts, and with the loss of a daemon it
ends all ranks. Where ranks heal there are no daemons: mpirun starts stubs on this host, and the
relays start the ranks. To mpirun a lost host is a stub that was killed; see `RemoteStubs`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ktrainer.errors import SetupError
from ktrainer.launch import host_relay, launcher_connection
from ktrainer.launch.hosts import Host, lost_hosts, python_command, silent_hosts
from ktrainer.launch.launcher_connection import BEAT_SECONDS
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.launch.rank_channel import PIPES, Options, fault_path, pipe_path
from ktrainer.launch.rank_stubs import RemoteStubs, split_command

READY_SECONDS = 15.0
_CLOSE_SECONDS = 3.0  # for all relays to end, then for the rest of their output
# Without a sign of life; longer than a relay waits for one of the launcher, so that ranks of a host
# that was cut off have ended, or been told to, before the others continue.
SILENT_SECONDS = 1.5 * launcher_connection.SILENT_SECONDS
# Variables of a login or of MPI's own, which differ from host to host.
_OF_THE_HOST = (
    *("_", "DISPLAY", "HOME", "HOST", "HOSTNAME", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME"),
    *("MAIL", "OLDPWD", "PATH", "PWD", "SHELL", "SHLVL", "TEMP", "TERM", "TMP", "TMPDIR", "USER"),
)
_OF_MPI = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")
_OF_THE_HOST_PREFIXES = (*_OF_MPI, "SSH_", "XDG_")
_MPI_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory")


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ranks on other hosts get."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_THE_HOST and not name.startswith(_OF_THE_HOST_PREFIXES)
    }


class HostConnections:
    """The launcher's ends of all relays.

    Args:
        hosts: with the number of ranks on each, in the order of the ranks.
        agent: words of the remote agent.
        here: names of hosts that are this one, where no agent is needed.
        bind: give each rank its own processors, where they are enough for its threads.
        threads: of a rank.
        start_ranks: the relays start the ranks, without daemons of mpirun.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        agent: Sequence[str],
        here: Sequence[str],
        *,
        bind: bool,
        threads: int,
        start_ranks: bool = False,
    ) -> None:
        self.hosts, self._agent, self._here = hosts, agent, here
        self._bind = threads if bind else None
        self._start_ranks = start_ranks
        self._relays: dict[str, _Relay] = {}  # by host
        self._stubs: RemoteStubs | None = None
        self._others = [host.name for host in hosts if host.name not in here]
        self._unanswering: list[str] = []
        self._looked = 0.0
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        names = [host.name for host in hosts for _ in range(host.slots)]
        self.host_of = dict(enumerate(names))

    def open(
        self,
        folder: Path,
        token: str,
        options: Options,
        env: Mapping[str, str],
        command: Sequence[str],
    ) -> list[str]:
        """Start all relays, and wait until the ranks' pipes exist on every host.

        Args:
            folder: the launcher's, with pipes of its own that the relays' frames are written to.
            token: the name of this launch.
            command: of mpirun.

        Returns:
            The command, with stubs for ranks if the relays start them.

        Raises:
            SetupError: a relay does not start.
        """
        of_mpirun, of_rank = split_command(command)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if self._start_ranks:
                self._stubs = RemoteStubs(folder, self._start_rank, self._kill_rank)
                command = [*of_mpirun, *self._stubs.command]
            request = {
                "bind": self._bind,
                "options": asdict(replace(options, terminal_out=None, terminal_err=None)),
                "environment": travelling(env),
                "folders": [v for k, v in env.items() if k in _MPI_FOLDERS],
                "command": of_rank if self._start_ranks else None,
                "cwd": os.getcwd(),
            }
            self._start_relays(folder, python_command(host_relay.__name__, token), request)
            self._wait_until_ready()
            undo.pop_all()
        return list(command)

    def _start_relays(self, folder: Path, words: Sequence[str], request: Mapping[str, Any]) -> None:
        """Start a relay on each host by these words, and tell it what to do and that this lives."""
        for host in self.hosts:
            here = host.name in self._here
            ranks = [rank for rank, name in self.host_of.items() if name == host.name]
            started = words if here else [*self._agent, host.name, shlex.join(words)]
            relay = _Relay(started, here, folder, ranks, self._stubs)
            self._relays[host.name] = relay
            relay.tell({**request, "ranks": ranks})
        self._closed.clear()  # a relay that is ready early hears from the launcher, too
        self._beats = threading.Thread(target=self._beat, name="beats to hosts", daemon=True)
        self._beats.start()

    def _wait_until_ready(self) -> None:
        until = time.monotonic() + READY_SECONDS
        self._unanswering = silent_hosts(self._others)
        for name, relay in self._relays.items():
            if not relay.ready.wait(max(0.0, until - time.monotonic())):
                raise SetupError(
                    f"host {name}: ktrainer did not start there within {READY_SECONDS:g} s; "
                    "see what the remote agent printed above"
                )

    def _beat(self) -> None:
        """Tell all relays again and again that the launcher lives, also while its output blocks."""
        while not self._closed.wait(BEAT_SECONDS):
            for relay in list(self._relays.values()):
                relay.tell({"alive": True})

    def find_lost(self) -> dict[int, str]:
        """Rank -> its host, for hosts whose relays have ended or been silent. Each is named once,
        and its ranks are lost to mpirun too. To be called often."""
        now = time.monotonic()
        if now - self._looked > BEAT_SECONDS:  # this process was stopped, or is loaded
            for relay in self._relays.values():
                relay.heard = max(relay.heard, now - launcher_connection.SILENT_SECONDS)
        self._looked = now
        names = [name for name, relay in self._relays.items() if relay.is_lost(now)]
        lost = {rank: name for rank, name in self.host_of.items() if name in names}
        if self._stubs is not None:
            self._stubs.lose(lost)
        for relay in [self._relays.pop(name) for name in names]:
            relay.close(now)
        return lost

    def take_ended(self) -> list[int]:
        """The ranks that relays have started and that have ended since the last call."""
        return [] if self._stubs is None else self._stubs.take_ended()

    def unreachable(self) -> dict[int, str]:
        """Rank -> its host, for hosts that cannot be reached any more; see `lost_hosts`."""
        names = lost_hosts(self._others, self._agent, self._unanswering)
        return {rank: name for rank, name in self.host_of.items() if name in names}

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to ranks, wherever they run; None: to all."""
        for relay in self._relays.values():
            relay.tell({"signal": number, "ranks": ranks})

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks which others have waited for in vain, also where the relay cannot."""
        self.signal(signal.SIGKILL, ranks)
        if (stubs := self._stubs) is not None:
            stubs.lose(ranks)

    def close(self) -> None:
        """End all relays, and what still runs on their hosts."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()
        for relay in self._relays.values():
            relay.end()
        until = time.monotonic() + _CLOSE_SECONDS
        for relay in self._relays.values():
            relay.close(until)
        if self._stubs is not None:
            self._stubs.close()
        self._relays, self._stubs = {}, None

    def _start_rank(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start a rank of which mpirun has started the stub."""
        own = {k: v for k, v in environment.items() if k.startswith(_OF_MPI)}
        if (relay := self._relays.get(self.host_of[rank])) is not None:
            relay.tell({"start": rank, "environment": own})
        elif self._stubs is not None:  # its host was lost before
            self._stubs.lose([rank])

    def _kill_rank(self, rank: int) -> None:
        """Kill a rank of which mpirun has ended the stub."""
        if (relay := self._relays.get(self.host_of[rank])) is not None:
            relay.tell({"signal": signal.SIGKILL, "ranks": [rank]})


class _Relay:
    """The relay of one host, as the launcher sees it.

    Args:
        command: starts it.
        here: its host is this one.
        folder: the launcher's, with the pipes of its ranks.
        ranks: of its host.
        stubs: of its ranks; None: mpirun starts them.

    Attributes:
        ready: set once the ranks can start.
        heard: when it last sent anything, by the monotonic clock.
    """

    def __init__(
        self,
        command: Sequence[str],
        here: bool,
        folder: Path,
        ranks: Sequence[int],
        stubs: RemoteStubs | None,
    ) -> None:
        self._folder, self._stubs = folder, stubs
        self.ready = threading.Event()
        self.heard, self._ended, self._blocked = time.monotonic(), False, False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # A relay ends with its standard input, and removes its files.
            preexec_fn=None if here else end_with_parent,
        )
        self._pipes = {
            (pipe, rank): os.open(pipe_path(folder, rank, pipe), os.O_WRONLY)
            for pipe in PIPES
            for rank in ranks
        }
        self._thread = threading.Thread(target=self._receive, name="host relay", daemon=True)
        self._thread.start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the relay has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def is_lost(self, now: float) -> bool:
        """Return whether the relay has ended, or been silent for long."""
        silent = now - self.heard > SILENT_SECONDS and not self._blocked
        return self._ended or silent

    def end(self) -> None:
        """Tell the relay to end its ranks, and itself."""
        assert self._process.stdin is not None
        self.tell({"end": True})
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, until: float) -> None:
        """Kill the relay at this time, by the monotonic clock, if it has not ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        if self._process.poll() is None:  # with what an agent has started here
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join(max(0.0, until + _CLOSE_SECONDS - time.monotonic()))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _receive(self) -> None:
        """Write what the relay sends to the launcher's pipes."""
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(OSError, ValueError), stream:
            while header := stream.readline():
                self.heard = time.monotonic()
                words = header.split()
                if len(words) == 4 and words[0] == b"frame":  # not a greeting of the host's shell
                    data = stream.read(int(words[3]))
                    self._blocked = True  # perhaps: the user may have paused the output
                    self._handle(words[1].decode(), int(words[2]), data)
                    self.heard, self._blocked = time.monotonic(), False
        self._ended = True
        for opened in self._pipes.values():
            os.close(opened)

    def _handle(self, kind: str, rank: int, data: bytes) -> None:
        if kind == "ready":
            self.ready.set()
        elif kind == "fault":
            fault_path(self._folder, rank).write_bytes(data)
        elif kind == "status" and self._stubs is not None:
            self._stubs.end_as(rank, int(data))
        elif (kind, rank) in self._pipes and not data:
            os.close(self._pipes.pop((kind, rank)))
        while data and (kind, rank) in self._pipes:
            data = data[os.write(self._pipes[kind, rank], data) :]
