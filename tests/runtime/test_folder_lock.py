"""One job at a time in a folder; that a second one is refused is row 22 of tests/faults."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktrainer.errors import SetupError
from ktrainer.runtime.folder_lock import FolderLock


def test_the_same_process_may_hold_it_again(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, "folder"), FolderLock(tmp_path, "folder")
    first.release()
    first.release()
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_removes_meanwhile(tmp_path: Path, monkeypatch) -> None:
    """Between opening and locking: the lock would be on a file that no process finds again."""
    flock, removed = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not removed:
            os.unlink(tmp_path / ".lock")
            removed.append(True)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = FolderLock(tmp_path, "folder")
    assert (tmp_path / ".lock").exists()
    lock.release()


def test_a_forgotten_lock_is_released(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "folder")
    del lock
    assert list(tmp_path.iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from ktrainer.runtime.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "folder")
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_holder_is_named_and_then_forgotten(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(SetupError, match=rf"in use by another job \(process {holder.pid} on "):
            FolderLock(tmp_path, "folder")
        holder.kill()
    FolderLock(tmp_path, "folder").release()


def test_a_file_system_without_locks_is_used_without_one(tmp_path: Path, monkeypatch) -> None:
    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    FolderLock(tmp_path, "folder").release()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "nowhere", "folder")
    (tmp_path / ".lock").mkdir()
    with pytest.raises((IsADirectoryError, SetupError)):
        FolderLock(tmp_path, "folder")
