"""Folders of one launch, which go with it; and those of launchers that were killed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

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
