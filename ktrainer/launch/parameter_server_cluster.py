"""Start a coordinator, workers and parameter servers on this host, instead of mpirun.

    python -m ktrainer.launch.parameter_server_cluster FOLDER WORKERS SERVERS COMMAND...

runs the command once for each task, with its own TF_CONFIG: rank 0 is the coordinator (the task
`chief`), then come the workers, then the servers. It ends when the coordinator does, with its exit
code. A killed worker is started again, since the coordinator continues without it meanwhile; a
server is not, since its part of the weights is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from ktrainer.launch import orphan_prevention, process_tree
from ktrainer.launch.rank_channel import PIPES, Note, encode, pipe_path

LOOPBACK = "127.0.0.1"
RESTARTS = 5  # of each worker
END_SECONDS = 10.0  # in which the others end once the coordinator has
_POLL = 0.05
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # requests to end


@dataclass
class LocalTask:
    """One process of the cluster.

    Attributes:
        rank: its number among all.
        job, index: its name in the cluster.
        process: while it runs, or as it ended.
        restarts: how often it has been started again.
    """

    rank: int
    job: str
    index: int
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0

    @property
    def name(self) -> str:
        return f"{self.job} {self.index}"


@dataclass
class ParameterServerCluster:
    """The tasks of one cluster, from start to end.

    Args:
        folder: the launcher's, with the pipes of all ranks.
        workers, servers: how many of each.
        command: what each task runs.
    """

    folder: Path
    workers: int
    servers: int
    command: Sequence[str]
    tasks: list[LocalTask] = field(default_factory=list)

    def run(self) -> int:
        """Run all tasks to their end; return the coordinator's exit code."""
        jobs = {"chief": 1, "worker": self.workers, "ps": self.servers}
        names = [(job, i) for job, count in jobs.items() for i in range(count)]
        self.tasks = [LocalTask(rank, *name) for rank, name in enumerate(names)]
        with _ports(len(names)) as ports, self._pipes():
            addresses = iter(f"{LOOPBACK}:{port}" for port in ports)
            self._jobs = {job: [next(addresses) for _ in range(n)] for job, n in jobs.items()}
            # The coordinator last: rank 0's output then begins when all others have started.
            for task in reversed(self.tasks):
                self._start(task)
            try:
                return self._watch()
            finally:
                self._end()

    def _start(self, task: LocalTask) -> None:
        config = {"cluster": self._jobs, "task": {"type": task.job, "index": task.index}}
        env = {
            **os.environ,
            **_devices(task, os.environ),
            "TF_CONFIG": json.dumps(config),
            "KTRAINER_RANK": str(task.rank),
        }
        task.process = subprocess.Popen(
            list(self.command), env=env, preexec_fn=orphan_prevention.end_with_parent
        )

    def _watch(self) -> int:
        """Wait for the coordinator; return its exit code as a shell would."""
        coordinator = self.tasks[0].process
        assert coordinator is not None
        while (code := coordinator.poll()) is None:
            for task in self.tasks[1:]:
                assert task.process is not None
                ended = task.process.poll()
                if ended is not None and self._may_restart(task, ended):
                    self._say(task, f"{task.name} {process_tree.ending(ended)}; starting it again")
                    task.restarts += 1
                    self._start(task)
            time.sleep(_POLL)
        if code < 0:
            self._fail(self.tasks[0], code)
        return code if code >= 0 else 128 - code

    def _may_restart(self, task: LocalTask, code: int) -> bool:
        killed = code < 0 and -code not in _REQUESTS
        return task.job == "worker" and killed and task.restarts < RESTARTS

    def _end(self) -> None:
        """Wait for the tasks, which the coordinator has asked to end; then kill them."""
        started = [task.process for task in self.tasks if task.process is not None]
        process_tree.wait_or_kill(started, END_SECONDS)

    @contextlib.contextmanager
    def _pipes(self) -> Iterator[None]:
        """Hold the writing end of every pipe, so that none ends while its task is restarted."""
        held = {
            (task.rank, pipe): os.open(pipe_path(self.folder, task.rank, pipe), os.O_WRONLY)
            for task in self.tasks
            for pipe in PIPES
        }
        self._held = held
        try:
            yield
        finally:
            for opened in held.values():
                os.close(opened)

    def _say(self, task: LocalTask, text: str) -> None:
        os.write(self._held[task.rank, "err"], f"ktrainer run: {text}\n".encode())

    def _fail(self, task: LocalTask, code: int) -> None:
        """Report the failure of a killed task."""
        note = Note(
            "failed",
            time=time.time(),
            code=128 - code,
            # No class: how reports sort failures.
            kind="ktrainer.launch.parameter_server_cluster.Killed",
            text=f"{task.name} {process_tree.ending(code)}",
        )
        os.write(self._held[task.rank, "notes"], encode(note))


def _devices(task: LocalTask, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that choose a task's devices: workers alone compute, each on its own
    GPU if there are enough."""
    gpus = len(glob("/dev/nvidia[0-9]*"))
    if task.job != "worker":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    if not gpus or "CUDA_VISIBLE_DEVICES" in environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(task.index % gpus)}


@contextlib.contextmanager
def _ports(count: int) -> Iterator[list[int]]:
    """Free ports of the loopback interface, kept from others until the tasks have them.

    TensorFlow's servers can bind a port that another socket has bound but does not listen on, if
    both set SO_REUSEADDR.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((LOOPBACK, 0))
        yield [each.getsockname()[1] for each in sockets]


def main(argv: list[str]) -> int:
    """Run the cluster that the arguments describe."""
    folder, workers, servers, *command = argv
    return ParameterServerCluster(Path(folder), int(workers), int(servers), command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
