"""Folders of a launch, and those that a killed launcher left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ktrainer.launch.launch_folders import mpi_folder, private_folder
from tests.launch.conftest import launch_command

SETTINGS = ["OMPI_MCA_btl_sm_backing_directory", "PRTE_MCA_prte_tmpdir_base"]


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


def folders_of(launcher: int) -> list[Path]:
    """What a launcher of this process id has in shared memory."""
    return [*Path("/dev/shm").glob(f"ktrainer-*-{launcher}-*")]


def test_mpi_leaves_nothing_that_a_later_launch_could_meet(tmp_path: Path) -> None:
    """mpirun does not start where a killed one of the same process id has left its session."""
    script, used = tmp_path / "script.py", tmp_path / "used"
    script.write_text(
        "import os, signal, sys, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        f"        print(*(os.environ.get(name, '') for name in {SETTINGS}), file=file)\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "time.sleep(60)"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(launch_command("-n", 2, script, used), env=env) as launcher:
        assert launcher.wait(timeout=60) != 0
    folders = {Path(name) for name in used.read_text().split()}
    assert folders, "where mpirun and the ranks had their files"
    for folder in folders:
        assert f"-{launcher.pid}-" in folder.name
        assert not folder.exists()
    assert folders_of(launcher.pid) == []
    assert names(temporary) == set()


def test_settings_of_the_user_stay() -> None:
    with mpi_folder({}) as all_of_them:
        assert {*all_of_them} <= {*SETTINGS}
    for name in all_of_them:
        with mpi_folder({name: "/mine"}) as others:
            assert {*others} == {*all_of_them} - {name}
    with mpi_folder(dict.fromkeys(SETTINGS, "/mine")) as none:
        assert none == {}


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


def test_folders_of_launches_on_other_hosts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts share the run's folder, and the first namespace has one number everywhere."""
    with monkeypatch.context() as on_another, private_folder(str(tmp_path)) as own:
        on_another.setattr(socket, "gethostname", lambda: "another")
        with private_folder(str(tmp_path)) as name:
            namespace = Path(name).name.split("-")[1]
    assert namespace != Path(own).name.split("-")[1]
    running_there = tmp_path / f"ktrainer-{namespace}-{dead()}-x"
    running_there.mkdir()
    with private_folder(str(tmp_path)):
        assert running_there.exists()
