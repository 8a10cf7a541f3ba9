"""Ranks that need not import TensorFlow: forks of a process that has, as those of a restart are.

mpirun ── rank_stub ┄┄ unix socket ┄┄ warm process ── rank
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ktrainer.launch import rank_stub
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.launch.warm_process import fork_when_asked
from tests.dist.harness import worker

IMPORTED = ("tensorflow", "keras", "numpy", "ktrainer.trainer", "tests.small")
START = f"from {__name__} import main; main()"


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
                    [sys.executable, "-c", START, str(listener.fileno())],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )

    def command(self, worker: list[str]) -> list[str]:
        """The program that mpirun starts for a rank with the command `worker`."""
        stub = f'exec "$0" -I -S {rank_stub.__file__} {self.folder}/$OMPI_COMM_WORLD_RANK "$0" "$@"'
        return ["sh", "-c", stub, *worker]

    def close(self) -> None:
        """End the processes. Forks have ended with their programs."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def main() -> None:
    """Be a rank in each fork."""
    end_with_parent()
    listener = socket.socket(fileno=int(sys.argv[1]))
    sys.argv = ["worker", *fork_when_asked(listener, IMPORTED)]
    end_with_parent()  # a setting that a fork does not inherit
    worker.main()
