"""One group of ranks, started by one mpirun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection as mp
from pathlib import Path
from typing import Any

import psutil

from ktrainer.errors import name_ranks
from ktrainer.launch.launch_folders import mpi_folder
from ktrainer.launch.mpirun_command import find_mpirun, mpi_environment, mpirun_command
from ktrainer.launch.process_tree import is_alive, wait_until_ended
from tests.dist.harness import leaks, wire
from tests.dist.harness.errors import Outcome, RankError, RankLost, RanksTimeout
from tests.dist.harness.warm import WarmProcesses

ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 90.0  # mpirun and the import of mpi4py, on a machine that is busy
FIRST_TASK_SECONDS = 60.0  # added to the first deadline: it usually imports TensorFlow
GRACE_SECONDS = 10.0  # what the other ranks have once one has failed
STACKS_SECONDS = 10.0  # for late ranks to write their stacks
QUIET_SECONDS = 0.5  # without output, after which they are taken to be complete


class PerRank:
    """An argument with a value of its own for each rank: `PerRank([a, b, c])`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


class Ranks:
    """`size` processes that run what they are given, again and again.

    Args:
        size: the world size.
        env: variables for the ranks, over those of this process.
        mpirun: more arguments for mpirun.
        warm: processes to fork, which have imported TensorFlow; not with variables in `env`, which
            imports may read.
    """

    def __init__(
        self,
        size: int,
        *,
        env: Mapping[str, str] | None = None,
        mpirun: Sequence[str] = (),
        warm: WarmProcesses | None = None,
    ) -> None:
        self.size = size
        self._warm = warm if not env else None
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._stack = contextlib.ExitStack()
        memory = self._stack.enter_context(mpi_folder(os.environ))
        self._log = self._folder / "output"
        self.failed = False  # a rank raised in the last task
        self._reusable = True
        self._tasks = 0
        self._connections: list[mp.Connection] = []
        self._processes: list[psutil.Process] = []  # not numbers, which soon are others'
        self._process = self._start({**memory, **(env or {})}, mpirun)
        try:
            self._accept()
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """Whether this group can take another task."""
        return bool(self._connections) and self._process.poll() is None and self._reusable

    def run(
        self, function: Callable[..., Any], *args: Any, deadline: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank.

        Args:
            function: defined at the top level of a module.
            args, kwargs: anything that pickles; a `PerRank` gives each rank its own entry.
            deadline: seconds for all ranks to return.

        Returns:
            What the ranks returned, by rank.

        Raises:
            RankError: a rank raised; the message holds its traceback.
            RanksTimeout: a rank did not return in time; the group is ended.
            RankLost: a rank was lost; the group is ended.
        """
        outcomes = self.outcomes(function, *args, deadline=deadline, **kwargs)
        if any(outcome.error is not None for outcome in outcomes):
            raise RankError(function.__qualname__, outcomes, self.output())
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, deadline: float = 60.0, **kwargs: Any
    ) -> list[Outcome]:
        """Like `run`, for tests that expect an error: how the call ended on each rank."""
        self._signal(signal.SIGCONT)
        deadline += 0 if self._tasks else FIRST_TASK_SECONDS
        self._tasks += 1
        self._mark = self._log.stat().st_size
        for rank, connection in enumerate(self._connections):
            own_args = [_pick(value, rank) for value in args]
            own_kwargs = {key: _pick(value, rank) for key, value in kwargs.items()}
            connection.send_bytes(wire.pack_task(function, own_args, own_kwargs, self.failed))
        outcomes = self._collect(function.__qualname__, deadline)
        # One rank may have left a collective that the others were in.
        self.failed = any(outcome.error is not None for outcome in outcomes)
        return outcomes

    def output(self) -> str:
        """What the ranks have written to stdout and stderr since the last task began."""
        with self._log.open("rb") as log:
            log.seek(getattr(self, "_mark", 0))
            return log.read().decode(errors="replace")

    def pause(self) -> None:
        """Stop the processes until their next task.

        Idle ranks take time from the others otherwise: Horovod's threads ask their peers for work
        a thousand times a second, and MPI waits by polling.
        """
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the processes: by asking, then by force."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.close()
        self._connections = []
        with contextlib.suppress(subprocess.TimeoutExpired):
            # MPI may not end in order while it has requests that were abandoned.
            self._process.wait(timeout=10 if self._reusable else 0)
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._connections = []
        processes = []
        try:
            top = psutil.Process(self._process.pid)
            processes = [*top.children(recursive=True), top]
        except psutil.NoSuchProcess:
            pass
        processes += self._processes
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_until_ended(processes, 5)
        self._process.wait(timeout=10)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._stack.close()

    def survivors(self) -> list[int]:
        """Process ids of ranks that still run."""
        return [process.pid for process in self._processes if is_alive(process)]

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            for process in self._processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def _start(self, env: Mapping[str, str], mpirun: Sequence[str]) -> subprocess.Popen[bytes]:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._folder / "s"))
        self._socket.listen(self.size)
        own = {
            **os.environ,
            **mpi_environment(),
            **one_thread(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            **env,
        }
        program = [sys.executable, "-m", "tests.dist.harness.worker", str(self._folder / "s")]
        if self._warm is not None:
            self._warm.start(self.size, own)
            for process in self._warm.processes.values():
                leaks.expect_process(process.pid)
            program = self._warm.command(program)
        command = mpirun_command(
            self.size,
            program,
            mpirun=find_mpirun(),
            root=os.geteuid() == 0,
            more=mpirun,
        )
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._folder,  # what tests write by default goes away with the group
                env=own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        leaks.expect_process(process.pid)
        return process

    def _accept(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        found: dict[int, tuple[mp.Connection, psutil.Process]] = {}
        self._socket.settimeout(0.2)
        while len(found) < self.size:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RanksTimeout(
                    f"{self.size} ranks did not start within {START_SECONDS:g} s "
                    f"(mpirun: {self._process.poll()}):\n{self.output()}"
                )
            try:
                peer, _ = self._socket.accept()
            except TimeoutError:
                continue
            peer.setblocking(True)
            connection = mp.Connection(peer.detach())
            leaks.expect_file(connection.fileno())
            rank, pid = connection.recv()
            found[rank] = connection, psutil.Process(pid)
            leaks.expect_process(pid)
        self._socket.close()
        self._connections = [found[rank][0] for rank in range(self.size)]
        self._processes = [found[rank][1] for rank in range(self.size)]

    def _collect(self, task: str, deadline: float) -> list[Outcome]:
        end = time.monotonic() + deadline
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.size:
            waiting = [c for c, rank in rank_of.items() if rank not in outcomes]
            ready = mp.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise self._failure(
                    RanksTimeout, task, f"no answer within {deadline:g} s", outcomes
                )
            lost = []
            for connection in ready:
                assert isinstance(connection, mp.Connection)
                rank = rank_of[connection]
                try:
                    message = connection.recv_bytes()
                except (EOFError, ConnectionError):
                    lost.append(rank)
                    continue
                value, error, text, seconds, reusable = wire.unpack_result(message)
                self._reusable &= reusable
                outcomes[rank] = Outcome(rank, value, error, text, seconds)
                if error is not None:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
            if lost:  # perhaps several: mpirun ends the others then
                reason = f"{name_ranks(sorted(lost))} {'are' if len(lost) > 1 else 'is'} lost"
                raise self._failure(RankLost, task, reason, outcomes)
        return [outcomes[rank] for rank in range(self.size)]

    def _failure(
        self,
        kind: type[AssertionError],
        task: str,
        reason: str,
        outcomes: Mapping[int, Outcome],
    ) -> AssertionError:
        """End the group; the error, with the stacks of ranks that have not answered."""
        late = [rank for rank in range(self.size) if rank not in outcomes]
        # Where one is lost, it writes none, and mpirun may have ended the others.
        output = self._output_with_stacks(late, 1.0 if kind is RankLost else STACKS_SECONDS)
        self.kill()
        lines = [f"{task}: {reason}; no answer from rank(s) {', '.join(map(str, late))}"]
        lines += [f"--- rank {o.rank}\n{o.traceback}" for o in outcomes.values() if o.traceback]
        return kind("\n".join([*lines, "--- output of all ranks", output]))

    def _output_with_stacks(self, late: Sequence[int], seconds: float) -> str:
        """The output once these ranks have written their stacks, or after so many seconds."""
        output = self.output()
        mark = "Current thread"  # of the fault handler: once in what each rank writes
        expected = output.count(mark) + len(late)
        for rank in late:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes[rank].send_signal(signal.SIGUSR1)
        now = time.monotonic()
        end, quiet_since = now + seconds, now
        while now < end and (output.count(mark) < expected or now - quiet_since < QUIET_SECONDS):
            time.sleep(0.05)
            before, output, now = output, self.output(), time.monotonic()
            quiet_since = quiet_since if output == before else now
        return output


def _pick(value: Any, rank: int) -> Any:
    return value.values[rank] if isinstance(value, PerRank) else value


def one_thread() -> dict[str, str]:
    """Variables that keep a rank quiet and on about one core.

    Two threads run operations: with one, ranks could not disagree on the order of collectives,
    and a test would not see a step that leaves that order to chance.
    """
    return {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "KERAS_BACKEND": "tensorflow",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTEROP_THREADS": "2",
        "TF_NUM_INTRAOP_THREADS": "1",
    }
