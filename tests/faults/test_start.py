"""Rows 9 and 10 at the start: a rank that misses `Trainer(...)` is named, and none waits on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ktrainer.launch import group_state
from ktrainer.launch.group_state import StartupWatch
from ktrainer.launch.mpirun_command import find_mpirun, mpi_environment, mpirun_command
from tests.launch.conftest import launch, script
from tests.processes import run

__all__ = ["launch", "script"]

# With MPI under way, ranks meet in it; else its own start waits, where Python cannot act. The
# others come together.
SCRIPT = """
import os, pathlib, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    if sys.argv[1] == "under way":
        from mpi4py import MPI
    time.sleep(60)
from ktrainer.distributed import open_world
came = {each: pathlib.Path(__file__).with_name(f"came-{each}") for each in ("0", "2")}
came[rank].touch()
while not all(path.exists() for path in came.values()):
    time.sleep(0.01)
open_world(start_deadline=float(sys.argv[2]))
"""


def test_the_launcher_names_who_does_not_come_and_where_it_is(
    launch: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], Path]
) -> None:
    done = launch("-n", 3, script(SCRIPT), "not yet", 2)
    assert done.returncode == 1, done.stderr
    assert "waited 2 s for rank 1 to come to `Trainer(...)`" in done.stderr
    assert "raise world.start_deadline" in done.stderr
    assert 'script.py", line 7 in <module>' in done.stderr.partition("rank 1 is at:\n")[2]


@pytest.mark.parametrize("mpi", ["under way", "not yet"])
def test_under_mpirun_the_ranks_end_by_themselves(script: Callable[[str], Path], mpi: str) -> None:
    seconds = "6" if mpi == "under way" else "2"  # MPI's own start has the deadline, too
    program = [sys.executable, str(script(SCRIPT)), mpi, seconds]
    command = mpirun_command(3, program, mpirun=find_mpirun(), root=os.geteuid() == 0)
    done = run(command, seconds=60, **mpi_environment())
    assert done.returncode == 1, done.stderr
    if mpi == "under way":
        assert "waited 6 s at step 0 in 'start of all ranks'" in done.stderr
        assert "Not there: rank 1, which did not come to `Trainer(...)`" in done.stderr
        assert "If it may take that long, raise world.start_deadline." in done.stderr
    else:
        assert "_start_mpi_with_the_other_ranks" in done.stderr


def test_the_user_is_shown_once_which_ranks_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_state, "NOTICE_SECONDS", 0.0)
    wait = StartupWatch(3)
    assert wait.notice() is None
    wait.record(2, 1800.0)
    notice = wait.notice()
    assert notice is not None
    assert "rank 2 has waited 0 s for ranks 0, 1 to come to `Trainer(...)`; after 1800 s" in notice
    assert wait.notice() is None
    assert wait.late(()) is None


def test_a_rank_that_ended_without_a_trainer_is_named() -> None:
    wait = StartupWatch(3)
    assert wait.late(()) is None
    wait.record(0, 0.0)
    wait.record(5, 0.0)  # one that joins later
    said = wait.late({1})
    assert said is not None
    assert "waited 0 s for ranks 1, 2 to come to `Trainer(...)`" in said
    assert "; rank 1 came to the end of the script without it." in said
    wait.record(1, 0.0)
    wait.record(2, 0.0)
    assert wait.late({1}) is None
