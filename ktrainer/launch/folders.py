"""Folders of one launch, which go with it; and those of launchers that were killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_SHARED_MEMORY = "/dev/shm"
_SEGMENTS = "OMPI_MCA_btl_sm_backing_directory"
_NAME = re.compile(r"ktrainer-(\d+)-(\d+)-\w+")


def private_folder(parent: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder in `parent` (default: where temporary files go), removed when it is closed.

    Folders of launchers of this user that have died without removing them are cleared up first.
    """
    parent = parent or tempfile.gettempdir()
    _sweep(Path(parent))
    # Process ids mean something within their namespace only, and containers may share a folder.
    prefix = f"ktrainer-{_namespace()}-{os.getpid()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)


def _sweep(parent: Path) -> None:
    for path in parent.glob("ktrainer-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != _namespace() or psutil.pid_exists(int(match[2])):
            continue
        try:
            owned = path.lstat().st_uid == os.getuid() and not path.is_symlink()
        except OSError:
            continue  # its owner, or another launcher, was faster
        if owned:
            shutil.rmtree(path, ignore_errors=True)


def _namespace() -> int:
    """A number for the namespace that this process's id belongs to."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def shared_memory_folder(given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """MPI settings that keep the segments through which ranks talk in a folder of their own.

    MPI leaves segments behind when ranks are killed; they go with the folder. None is made where
    the environment `given` already says which to use.
    """
    if _SEGMENTS not in given and os.access(_SHARED_MEMORY, os.W_OK):
        with private_folder(_SHARED_MEMORY) as name:
            yield {_SEGMENTS: name}
    else:
        yield {}
