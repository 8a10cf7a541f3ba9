"""Folders of a launch, and those that a killed launcher left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ktrainer.launch.launch_folders import private_folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def dead() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_folder_goes_with_its_launch(tmp_path: Path) -> None:
    with private_folder(str(tmp_path)) as name:
        assert Path(name).parent == tmp_path
        assert Path(name).stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == set()


def test_what_killed_launchers_left_is_cleared_up(tmp_path: Path) -> None:
    with private_folder(str(tmp_path)) as name:
        _, namespace, pid, _ = Path(name).name.split("-")
        kept = {
            Path(name).name,
            f"ktrainer-{namespace}-{pid}-another",  # that process runs
            f"ktrainer-{int(namespace) + 1}-{dead()}-container",  # an id from elsewhere
            f"ktrainer-horovod-{dead()}-x",
            f"ktrainer-{namespace}-{dead()}-link",
        }
        left = f"ktrainer-{namespace}-{dead()}-abc_12"
        (tmp_path / "target").mkdir()
        for each in {left, *kept} - {Path(name).name}:
            if each.endswith("-link"):
                (tmp_path / each).symlink_to(tmp_path / "target")
            else:
                (tmp_path / each).mkdir()
        (tmp_path / left / "segment").write_text("x")
        with private_folder(str(tmp_path)) as other:
            assert names(tmp_path) == {*kept, Path(other).name, "target"}
