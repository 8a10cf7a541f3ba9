"""One job at a time in a folder; that a second one is refused is row 22 of tests/faults."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

import ktrainer.folderlock as folderlock
from ktrainer.errors import SetupError
from ktrainer.folderlock import FolderLock


def test_the_same_process_may_hold_it_again(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path, "folder"), FolderLock(tmp_path, "folder")
    first.release()
    first.release()
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_its_holder_removes_meanwhile(tmp_path: Path, monkeypatch) -> None:
    """Between opening and locking: the lock would be on a file that nobody finds again."""
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


def test_what_is_forgotten_is_let_go_of(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "folder")
    del lock
    assert str(tmp_path.resolve()) not in folderlock._held


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "nowhere", "folder")
    (tmp_path / ".lock").mkdir()
    with pytest.raises((IsADirectoryError, SetupError)):
        FolderLock(tmp_path, "folder")
