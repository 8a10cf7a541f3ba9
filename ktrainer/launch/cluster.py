"""Start a coordinator, workers and parameter servers on this host, in the place of mpirun.

`python -m ktrainer.launch.cluster FOLDER WORKERS SERVERS SCRIPT ARGS...` runs the script once for
each task, with a TF_CONFIG of its own: rank 0 is the coordinator (the task `chief`), then come the
workers, then the servers. It ends when the coordinator does, with its exit code. A worker that is
killed is started again, for the coordinator carries on without it meanwhile; a server is not, for
its part of the weights is gone.
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

from ktrainer.launch import kernel
from ktrainer.launch.channel import PIPES, Note, encode, pipe_path

LOOPBACK = "127.0.0.1"
RESTARTS = 5  # of each worker
END_SECONDS = 10.0  # what the others have to end in once the coordinator has
_POLL = 0.05
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # somebody wants the process to end


@dataclass
class Task:
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
class Cluster:
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
    tasks: list[Task] = field(default_factory=list)

    def run(self) -> int:
        """Start all; the coordinator's exit code once all have ended."""
        jobs = {"chief": 1, "worker": self.workers, "ps": self.servers}
        names = [(job, i) for job, count in jobs.items() for i in range(count)]
        self.tasks = [Task(rank, *name) for rank, name in enumerate(names)]
        with _ports(len(names)) as ports, self._pipes():
            addresses = iter(f"{LOOPBACK}:{port}" for port in ports)
            self._jobs = {job: [next(addresses) for _ in range(n)] for job, n in jobs.items()}
            # The coordinator last: rank 0's output then begins when all others are on their way.
            for task in reversed(self.tasks):
                self._start(task)
            try:
                return self._watch()
            finally:
                self._end()

    def _start(self, task: Task) -> None:
        config = {"cluster": self._jobs, "task": {"type": task.job, "index": task.index}}
        env = {
            **os.environ,
            **_devices(task, os.environ),
            "TF_CONFIG": json.dumps(config),
            "KTRAINER_RANK": str(task.rank),
        }
        task.process = subprocess.Popen(
            list(self.command), env=env, preexec_fn=kernel.end_with_parent
        )

    def _watch(self) -> int:
        """Until the coordinator has ended; returns its exit code, as a shell would say it."""
        coordinator = self.tasks[0].process
        assert coordinator is not None
        while (code := coordinator.poll()) is None:
            for task in self.tasks[1:]:
                assert task.process is not None
                ended = task.process.poll()
                if ended is not None and self._may_restart(task, ended):
                    self._say(task, f"{task.name} {_how(ended)}; starting it again")
                    task.restarts += 1
                    self._start(task)
            time.sleep(_POLL)
        if code < 0:
            self._fail(self.tasks[0], code)
        return code if code >= 0 else 128 - code

    def _may_restart(self, task: Task, code: int) -> bool:
        killed = code < 0 and -code not in _ASKED
        return task.job == "worker" and killed and task.restarts < RESTARTS

    def _end(self) -> None:
        """Wait for the tasks, which the coordinator has told that it is done; then end them."""
        deadline = time.monotonic() + END_SECONDS
        for task in self.tasks:
            if task.process is None:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                task.process.wait(max(0.0, deadline - time.monotonic()))
            if task.process.poll() is None:
                task.process.kill()
                task.process.wait()

    @contextlib.contextmanager
    def _pipes(self) -> Iterator[None]:
        """Hold the writing end of every pipe, so that none ends while its task is started anew."""
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

    def _say(self, task: Task, text: str) -> None:
        os.write(self._held[task.rank, "err"], f"ktrainer run: {text}\n".encode())

    def _fail(self, task: Task, code: int) -> None:
        """Report on behalf of a task that could not."""
        note = Note(
            "failed",
            time=time.time(),
            code=128 - code,
            kind="ktrainer.launch.cluster.Killed",
            text=f"{task.name} {_how(code)}",
        )
        os.write(self._held[task.rank, "say"], encode(note))


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.Signals(-code).name})"


def _devices(task: Task, environ: Mapping[str, str]) -> dict[str, str]:
    """Only workers compute; each on this host has GPUs of its own, if there are enough."""
    gpus = len(glob("/dev/nvidia[0-9]*"))
    if task.job != "worker":
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    if not gpus or "CUDA_VISIBLE_DEVICES" in environ:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(task.index % gpus)}


@contextlib.contextmanager
def _ports(count: int) -> Iterator[list[int]]:
    """Free ports of the loopback interface, kept from others until the tasks have them.

    TensorFlow's servers take a port that somebody has bound and does not listen at, if both allow
    it (SO_REUSEADDR).
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind((LOOPBACK, 0))
        yield [each.getsockname()[1] for each in sockets]


def main(argv: list[str]) -> int:
    """Run the cluster that the launcher has asked for."""
    folder, workers, servers, *command = argv
    return Cluster(Path(folder), int(workers), int(servers), command).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
