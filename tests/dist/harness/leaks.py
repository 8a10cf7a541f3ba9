"""What a piece of code left behind: threads, processes, ports, files, variables."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

# Set by TensorFlow, scikit-learn, MPI and pytest themselves, once and for good.
_FOREIGN_VARIABLES = (
    "COLUMNS",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_",
    "HFI_NO_BACKTRACE",
    "IPATH_NO_BACKTRACE",
    "KMP_",
    "LINES",
    "OMPI_",
    "OPAL_",
    "PMIX_",
    "PRTE_",
    "PYTEST_",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
)
_FOREIGN_FILES = ("/dev/", "/proc/", "/sys/", "anon_inode:", "/memfd:")

# Things have time to end. Tests that leave something behind on purpose shorten it.
seconds_to_end = 20.0

_known_processes: set[psutil.Process] = set()  # not numbers, which soon are others'
_known_files: set[str] = set()
_known_ports: set[str] = set()


def expect_process(pid: int) -> None:
    """Do not report this child: it belongs to the pool, which ends it with the session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _known_processes.add(psutil.Process(pid))


def expect_file(descriptor: int) -> None:
    """Do not report this open file or socket: it belongs to the pool."""
    _known_files.add(os.readlink(f"/proc/self/fd/{descriptor}"))


def expect_ports() -> None:
    """Do not report the ports that are open now: TensorFlow's servers cannot be closed."""
    _known_ports.update(_ports())


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment; each is a set of printable entries."""

    threads: frozenset[str]
    processes: frozenset[str]
    ports: frozenset[str]
    files: frozenset[str]
    environ: frozenset[str]
    folder: frozenset[str]


def take() -> Snapshot:
    """A snapshot of this process. Takes a few milliseconds."""
    return Snapshot(
        threads=frozenset(_threads()),
        processes=frozenset(_processes()),
        ports=frozenset(_ports()) - _known_ports,
        files=frozenset(_files()),
        environ=frozenset(_variables()),
        folder=frozenset([os.getcwd()]),
    )


def wait_for_none(before: Snapshot) -> list[str]:
    """Descriptions of what is there now and was not `before`, after `seconds_to_end` at most."""
    deadline = time.monotonic() + seconds_to_end
    found = compare(before, take())
    while found and time.monotonic() < deadline:
        gc.collect()
        _reap_adopted()
        time.sleep(0.05)
        found = compare(before, take())
    return found


def _reap_adopted() -> None:
    """Collect ended processes that others have started and left to this one: until then the first
    process of their process namespace does not end either."""
    own = {each.pid for each in gc.get_objects() if isinstance(each, subprocess.Popen)}
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid not in own and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def compare(before: Snapshot, after: Snapshot) -> list[str]:
    """One line for each thing in `after` that is not in `before`."""
    lines = []
    for field in ("threads", "processes", "ports", "files", "environ", "folder"):
        kind = {"environ": "variable", "folder": "working folder"}.get(field, field.rstrip("s"))
        kind = "process" if field == "processes" else kind
        lines += [f"{kind}: {x}" for x in sorted(getattr(after, field) - getattr(before, field))]
    gone = {entry.partition("=")[0] for entry in before.environ - after.environ}
    kept = {entry.partition("=")[0] for entry in after.environ}
    lines += [f"variable removed: {name}" for name in sorted(gone - kept)]
    return lines


def _threads() -> Iterable[str]:
    for thread in threading.enumerate():
        # A thread of C++ that once called into Python stays listed for ever as a dummy.
        if not isinstance(thread, threading._DummyThread):
            yield f"{thread.name} ({thread.ident})"


def _processes() -> Iterable[str]:
    try:
        children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children")
        pids = [int(pid) for pid in children.read_text().split()]
    except OSError:
        pids = [child.pid for child in psutil.Process().children()]
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process not in _known_processes and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{pid}: {' '.join(process.cmdline())[:120]}"
        except psutil.NoSuchProcess:
            continue


def _ports() -> Iterable[str]:
    # The sockets are asked: to read the kernel's tables of connections takes many times as long.
    for entry, target in _open_files():
        if target.startswith("socket:"):
            with contextlib.suppress(OSError):
                one = socket.socket(fileno=int(entry))
                try:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        yield "{}:{}".format(*one.getsockname())
                finally:
                    one.detach()  # it belongs to another object


def _open_files() -> Iterable[tuple[str, str]]:
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            yield entry, os.readlink(f"/proc/self/fd/{entry}")


def _files() -> Iterable[str]:
    # MPI opens and keeps sockets and pipes of its own as it talks to peers.
    skip_channels = "mpi4py.MPI" in sys.modules
    for entry, target in _open_files():
        if target in _known_files or target.startswith(_FOREIGN_FILES):
            continue
        if skip_channels and target.startswith(("socket:", "pipe:")):
            continue
        yield f"{entry}: {target}"


def _variables() -> Iterable[str]:
    for name, value in os.environ.items():
        if not name.startswith(_FOREIGN_VARIABLES):
            yield f"{name}={value}"
