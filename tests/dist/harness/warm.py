"""Ranks that need not import TensorFlow: forks of a process that has.

mpirun starts this file as a program. It hands its environment and files to the process that is to
fork, and stands for the fork from then on: each ends as the other does.

    mpirun ── warm.py ┄┄┄ unix socket ┄┄┄ keeper ── rank
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import connection as mp
from pathlib import Path

RANK = "OMPI_COMM_WORLD_RANK"
IMPORTED = ("tensorflow", "keras", "ktrainer.trainer", "tests.small")
_FILES = 3  # stdin, stdout and stderr


class WarmProcesses:
    """Processes to fork: one for each rank, so that ranks hash strings differently, as others do.

    Args:
        folder: where their sockets are; exists as long as they do.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, size: int, env: Mapping[str, str]) -> None:
        """Have as many as a group of `size` ranks needs.

        A launcher that a test runs in this process ends all of its children: start them again.
        """
        for rank in range(size):
            if rank in self.processes and self.processes[rank].poll() is None:
                continue
            path = self.folder / str(rank)
            path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(listener.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )

    def command(self, socket_of_tests: str) -> list[str]:
        """The program that mpirun starts for a rank that runs `worker.main(socket_of_tests)`."""
        return [sys.executable, "-I", "-S", __file__, str(self.folder), socket_of_tests]

    def close(self) -> None:
        """End the processes. Forks have ended with their programs."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def _stand_for_a_fork(folder: str, argument: str) -> None:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"{folder}/{os.environ[RANK]}")
    socket.send_fds(peer, [b"-"], list(range(_FILES)))
    connection = mp.Connection(peer.detach())
    connection.send((dict(os.environ), os.getcwd(), argument))
    try:
        status = connection.recv()
    except EOFError:
        status = -signal.SIGKILL
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _fork_when_asked(listener: socket.socket) -> str:
    """Returns the argument of a rank, in its process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        peer, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _keep_a_rank(peer)
        peer.close()


def _keep_a_rank(peer: socket.socket) -> str:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = socket.recv_fds(peer, 1, _FILES)[1]
    connection = mp.Connection(peer.detach())
    environment, folder, argument = connection.recv()
    rank = os.fork()
    if rank:
        end = os.pidfd_open(rank)
        if end not in select.select([end, connection], [], [])[0]:
            os.kill(rank, signal.SIGKILL)  # mpirun has ended the program
        with contextlib.suppress(OSError):
            connection.send(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return str(argument)


def main() -> None:
    """Import what takes time; then fork whenever asked, and be a rank in each fork."""
    from ktrainer.launch.orphan_prevention import end_with_parent

    end_with_parent()
    for name in IMPORTED:
        importlib.import_module(name)
    assert "mpi4py.MPI" not in sys.modules, "MPI starts as it is imported, which only a rank may"
    gc.freeze()  # collections in forks need not look through what was imported
    sys.argv = ["worker", _fork_when_asked(socket.socket(fileno=int(sys.argv[1])))]
    from tests.dist.harness import worker

    worker.main()


if __name__ == "__main__":
    if sys.flags.isolated:
        _stand_for_a_fork(*sys.argv[1:])
    else:
        main()
