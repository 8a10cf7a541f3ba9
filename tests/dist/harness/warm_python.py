"""A `python` whose scripts and ranks need not import TensorFlow: they are forks of a process that
has, as the ranks of a restart are.

    test ── python script.py ┄┄ unix socket ┄┄ warm process ── script
    test ── ktrainer run ── mpirun ── rank_stub ┄┄ the same ── rank
    a host's rank_stub ┄┄ a fork of the same that has entered the host's namespaces ── rank

`tests/launch/test_warm.py` shows that such a fork is as a process of its own. All else that this
`python` is asked for, it does as the real one.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import platform
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ktrainer.launch import data_service_process, rank_process, rank_stub
from ktrainer.launch.orphan_prevention import end_with_parent
from ktrainer.launch.rank_stubs import listen
from ktrainer.launch.warm_process import fork_when_asked
from tests.dist.harness import leaks

if TYPE_CHECKING:
    from tests.dist.harness.hosts import Hosts

ROOT = Path(__file__).resolve().parents[3]
IMPORTED = (
    *("tensorflow", "keras", "numpy", "ktrainer.trainer", "ktrainer.training.run"),
    *("ktrainer.script.routing", "ktrainer.backends.data_parallel", "tests.small"),
)
START = f"from {__name__} import main; main()"
CLI = "ktrainer.cli.main"
# mpirun is beside the real one.
LAUNCH = (
    "import runpy, sys; from ktrainer.launch import mpirun_command; "
    "sys.executable = sys.argv.pop(1); "
    f'runpy.run_module("{CLI}", run_name="__main__", alter_sys=True)'
)
# What is read as modules are imported.
READ = ("CUDA_", "KERAS", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS", "PYTHON", "TF_", "XLA_")

_PROGRAM = f"""#!/bin/sh
fork_of() {{
  socket=$1; shift
  exec "{sys.executable}" -I -S "{rank_stub.__file__}" "$socket" "{sys.executable}" "$@"
}}
stub() {{
  read -r host < /proc/sys/kernel/hostname
  [ "$host" != "HOST" ] || fork_of FOLDER/socket "$@"
  socket=FOLDER/$host.$(readlink /proc/self/ns/pid)
  [ ! -S "$socket" ] || fork_of "$socket" "$@"
  exec "{sys.executable}" "$@"
}}
case "$1 $2 $3" in
"-m {__name__} "*) fork_of FOLDER/socket "$@" $$ ;;
"-m {rank_process.__name__} "*) stub "$@" ;;
"-m {data_service_process.__name__} "*) stub "$@" ;;
"-m {CLI} plan" | "-m {CLI} checkpoint") stub "$@" ;;
"-m {CLI} "*) shift 2; exec "{sys.executable}" -c '{LAUNCH}' "$0" "$@" ;;
esac
case "$1" in
*.py) stub "$@" ;;
esac
exec "{sys.executable}" "$@"
"""


class WarmPython:
    """The program, and the process that it asks for forks."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-python-")
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._hosts: set[tuple[str, int]] = set()  # with processes to fork, and their first ones
        self.path = Path(self._folder.name) / "python"
        self.path.write_text(
            _PROGRAM.replace("FOLDER", self._folder.name).replace("HOST", socket.gethostname())
        )
        self.path.chmod(0o755)
        # mpirun starts it on other hosts, and looks for it beside this program.
        self.path.with_name("prted").symlink_to(Path(sys.executable).with_name("prted"))

    def executable(self, environment: Mapping[str, str]) -> str:
        """What to start instead of `sys.executable`: this, or that itself if the environment has
        other values of what imports read."""
        if self._process is None or self._process.poll() is not None:
            # A launcher that a test runs in this process has ended it with all other children.
            self._start()
        same = _read(environment) == _read(self._environment)
        return str(self.path) if same else sys.executable

    def executable_on(self, made: Hosts, environment: Mapping[str, str]) -> str:
        """`executable` for commands on hosts.

        Each gets two processes to fork: the agent's commands have process numbers of the host. What
        a prelude mounts is not mounted in forks.
        """
        program = self.executable(environment)
        if program == str(self.path):
            for host in range(len(made.names)):
                first = made.first(host)
                if (made.names[host], first) not in self._hosts:
                    self._hosts.add((made.names[host], first))
                    command = (program, "-m", __name__)
                    made.serve(*command, self._socket(made, host, first), first)
                    own = self._socket(made, host, os.getpid())
                    made.serve(*made.command(host, [*command, own]))
        return program

    def _socket(self, made: Hosts, host: int, process: int) -> Path:
        space = os.readlink(f"/proc/{process}/ns/pid")
        return self.path.with_name(f"{made.names[host]}.{space}")

    def _start(self) -> None:
        path = self.path.with_name("socket")
        path.unlink(missing_ok=True)
        self._environment = dict(os.environ)
        path_of_modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with listen(path) as listener:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, str(listener.fileno()), str(self.path)],
                env={
                    **self._environment,
                    "PYTHONPATH": path_of_modules.rstrip(os.pathsep),
                    "PYTHONHASHSEED": "0",  # several ranks hash alike
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        leaks.expect_process(self._process.pid)

    def close(self) -> None:
        """End the process, and with it its forks."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _read(environment: Mapping[str, str]) -> dict[str, object]:
    """What the imports of a script read of its environment."""
    found: dict[str, object] = {k: v for k, v in environment.items() if k.startswith(READ)}
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    return {**found, "PYTHONPATH": {str(ROOT), ""} ^ {"", *folders, str(ROOT)}}


def main() -> None:
    """Be a rank, a command, a script, or the process to fork of a host in each fork."""
    end_with_parent()
    number, program = sys.argv[1:]
    _serve(socket.socket(fileno=int(number)), program)


def _serve(listener: socket.socket, program: str) -> None:
    fork_when_asked(listener, IMPORTED)
    end_with_parent()  # a setting that a fork does not inherit
    tempfile.tempdir = platform._uname_cache = None  # type: ignore[attr-defined]  # hosts differ
    words = sys.orig_argv[1:]
    if words[:2] == ["-m", __name__]:
        _serve(_enter(*words[2:]), program)
    elif words[:2] == ["-m", rank_process.__name__]:
        rank_process.main(words[2:])
    elif words[0] == "-m":
        from ktrainer.launch import mpirun_command  # noqa: F401  # as in LAUNCH

        sys.argv, sys.executable = words[1:], program
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        _run_script(words)


def _enter(path: str, process: str, *_: str) -> socket.socket:
    """Enter the namespaces of a process of a host; returns what stubs connect to."""
    Path(path).unlink(missing_ok=True)  # of a host that is down now
    listener, libc = listen(Path(path)), ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc", "pid", "mnt"):  # the last one changes /proc
        with open(f"/proc/{process}/ns/{kind}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns to {namespace.name}")
    if (pid := os.fork()) != 0:  # only what is started from now on has those process numbers
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    end_with_parent()
    print("up", flush=True)
    return listener


def _run_script(words: list[str]) -> None:
    script, path = ModuleType("__main__"), Path(words[0]).absolute()
    script.__file__ = str(path)
    script.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = script
    sys.argv, sys.path[0] = words, str(path.resolve().parent)
    exec(compile(path.read_bytes(), path, "exec"), script.__dict__)
