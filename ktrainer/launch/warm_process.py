"""A process that has imported TensorFlow, of which the ranks of a restart are forks.

The launcher starts it while the first ranks train. It makes no TensorFlow context and does not
start MPI, so it has one thread, but for those of libraries that are made for forks. A fork of it is
an interpreter that only has its imports behind it: mpirun's environment, files, working folder and
umask come from `rank_stub`, the program that mpirun starts.

    launcher ─┬─ mpirun ─── stub ┄┄┐ unix socket
              └─ warm process ─────┴─ rank

Each ends with the other: a rank's status is that of its stub; a rank whose stub was killed is
killed, as are all ranks with the warm process, and that with the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktrainer.launch import orphan_prevention, rank_process, rank_stub
from ktrainer.launch.rank_stubs import PYTHON, accept, listen, split_command, stub_command
from ktrainer.runtime.garbage_collection import paused_collection

# Not what starts MPI.
_IMPORTS = (
    *("tensorflow", "keras", "numpy", "ktrainer.trainer", "ktrainer.training.run"),
    *("ktrainer.script.routing", "ktrainer.backends.data_parallel"),
    "ktrainer.backends.pipeline.backend",
)
_LATER_SECONDS = 5.0  # from the first rank's import to that of the warm process
_END_SECONDS = 5.0


class WarmProcess:
    """The warm process of a launch, on the launcher's side.

    Args:
        folder: for its socket; exists as long as the launch.
        environment: of the ranks; imports read it.

    Attributes:
        why_not: why ranks cannot be forks of it; empty: they can.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._path, self._environment = folder / "warm", dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._due: float | None = None
        self.why_not = "they ended before there was a process to fork"

    @property
    def pid(self) -> int | None:
        """Its process id; None before it is started."""
        return self._process.pid if self._process is not None else None

    def record_import(self, changed: str) -> None:
        """Record that a rank begins to import TensorFlow.

        Args:
            changed: the environment variables that its script has changed before.
        """
        if changed:
            self.why_not = f"the script sets {changed} before it imports TensorFlow"
            self._due = math.inf
            self.close()
        elif self._due is None:
            self._due = time.monotonic() + _LATER_SECONDS

    def start_when_due(self) -> None:
        """Start it once the ranks, which share the processors, are likely to have imported."""
        if self._due is None or time.monotonic() < self._due:
            return
        self._due = math.inf
        try:
            self._start()
            self.why_not = ""
        except OSError as error:
            self.why_not = str(error)

    def _start(self) -> None:
        # Ranks that ask for a fork while it imports wait for that.
        with listen(self._path) as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,
                preexec_fn=orphan_prevention.end_with_parent,
            )

    def check(self) -> None:
        """Note why it cannot be used, if it has ended."""
        if self._process is not None and not self.why_not and self._process.poll() is not None:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), "no output")
            code = self._process.returncode
            self.why_not = f"the process to fork ended with exit code {code}: {said}"

    def command(self, command: Sequence[str]) -> list[str]:
        """The `command` of mpirun, with programs that stand for ranks if they can be forks."""
        if self.why_not:
            return list(command)
        own, of_rank = split_command(command)
        return [*own, *stub_command(self._path), *of_rank]

    def close(self) -> None:
        """End it, and its ranks."""
        self._output.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_SECONDS)


def no_warm_process(args: argparse.Namespace) -> str:
    """Why a launch has none; empty if it has one."""
    if args.workers is not None:
        return "parameter servers are started without mpirun"
    if args.hosts or args.hostfile:
        return "processes on several hosts have no such process"
    return "" if hasattr(os, "pidfd_open") else "it needs Linux 5.3"


class _Ranks:
    """The forks of this process, and the connections to their stubs."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._of_peer: dict[int, tuple[int, socket.socket]] = {}  # pid and connection, by file
        self._of_end: dict[int, tuple[int, socket.socket]] = {}  # the same, by the pidfd

    def serve(self) -> tuple[list[int], Any]:
        """Fork whenever asked; returns in each fork, with the rank's files and request."""
        while True:
            heard = self._listener.fileno()
            for file in select.select([heard, *self._of_peer, *self._of_end], [], [])[0]:
                if file == heard:
                    found = self._begin()
                    if found is not None:
                        return found
                elif file in self._of_end:
                    self._report(file)
                elif file in self._of_peer:  # its stub was ended
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self._of_peer.pop(file)[0], signal.SIGKILL)

    def _begin(self) -> tuple[list[int], Any] | None:
        if (accepted := accept(self._listener)) is None:
            return None
        peer, files, request = accepted
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            self._close_all(peer)
            return files, request
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # as in the fork, whichever comes first
            os.setpgid(pid, pid)
        with contextlib.suppress(OSError):
            peer.sendall(rank_stub.LENGTH.pack(pid))
        self._of_peer[peer.fileno()] = self._of_end[os.pidfd_open(pid)] = (pid, peer)
        return None

    def _report(self, end: int) -> None:
        pid, peer = self._of_end.pop(end)
        os.close(end)
        self._of_peer.pop(peer.fileno(), None)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            peer.sendall(rank_stub.LENGTH.pack(status))
        peer.close()

    def _close_all(self, peer: socket.socket) -> None:
        self._listener.close()
        peer.close()
        for end, (_, other) in self._of_end.items():
            os.close(end)
            other.close()


def _become(files: Sequence[int], request: Any) -> list[str]:
    """Take over what mpirun gave the stub; returns the arguments of the rank's module."""
    environment, folder, umask, command = request
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    os.umask(umask)
    sys.orig_argv[:] = command  # by which `--replace` starts more ranks
    sys.path[0] = folder  # as `python -m`
    # Its state was drawn in the warm process; that of `random` is drawn again by a fork itself.
    sys.modules["numpy"].random.seed()
    words: list[str] = command[len(PYTHON) + 1 :]
    return words


def _threads() -> list[str]:
    """Names of the threads that a fork would miss.

    OpenBLAS ends its own before each fork and starts them when it needs them; jemalloc (pyarrow has
    it) disables its own in a fork.
    """
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    others = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in others]
    return [name for name in names if not name.startswith("jemalloc")]


def fork_when_asked(listener: socket.socket, imports: Sequence[str]) -> list[str]:
    """Import modules; then fork for every stub that connects.

    Args:
        listener: where stubs connect.
        imports: names of modules.

    Returns:
        In each fork, the arguments of the module in the stub's command, `python -m MODULE ...`.
    """
    with paused_collection():
        for name in imports:
            importlib.import_module(name)
    if "mpi4py.MPI" in sys.modules:
        sys.exit("imports have started MPI, which a fork must not have")
    if threads := _threads():
        sys.exit(f"imports have started threads, which a fork must not have: {', '.join(threads)}")
    gc.collect()
    gc.freeze()  # collections in forks need not look through what was imported
    return _become(*_Ranks(listener).serve())


def main() -> None:
    """Be a rank in each fork."""
    rank_process.main(fork_when_asked(socket.socket(fileno=int(sys.argv[1])), _IMPORTS))


if __name__ == "__main__":
    main()
