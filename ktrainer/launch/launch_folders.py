"""Temporary folders of a launch, and the removal of those that killed launchers have left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_SHARED_MEMORY = "/dev/shm"
_SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"
_SESSIONS = "PRTE_MCA_prte_tmpdir_base"
_NAME = re.compile(r"ktrainer-(\d+)-(\d+)-\w+")


def private_folder(parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder in `parent` (default: where temporary files go), removed when it is closed.

    Folders that killed launchers of this user have left are removed first.
    """
    parent = parent or tempfile.gettempdir()
    _remove_leftovers(Path(parent))
    # Process ids mean something within their namespace only, and containers may share a folder.
    prefix = f"ktrainer-{_namespace()}-{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)


def _remove_leftovers(parent: Path) -> None:
    for path in parent.glob("ktrainer-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != _namespace() or psutil.pid_exists(int(match[2])):
            continue
        try:
            owned = path.lstat().st_uid == os.getuid() and not path.is_symlink()
        except OSError:
            continue  # its owner, or another launcher, has removed it
        if owned:
            shutil.rmtree(path, ignore_errors=True)


def _namespace() -> int:
    """A number for the namespace that this process's id belongs to. The first namespace has the
    same number on every host, and hosts may share a folder."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        number = 0
    return zlib.crc32(f"{number} {socket.gethostname()}".encode())


@contextlib.contextmanager
def mpi_folder(given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """MPI settings for a folder that holds what MPI would otherwise leave behind when it is killed:
    the ranks' shared-memory segments, and the session folder of mpirun.

    mpirun names the latter by its process id, and does not start where there is one of that name
    already: "The PMIx server's listener thread failed to start". Process ids come again.

    Settings that are in the environment `given` stay as they are.
    """
    in_memory = os.access(_SHARED_MEMORY, os.W_OK)
    with private_folder(_SHARED_MEMORY if in_memory else None) as name:
        settings = {_SESSIONS: name, **({_SEGMENTS: name} if in_memory else {})}
        yield {key: value for key, value in settings.items() if key not in given}
