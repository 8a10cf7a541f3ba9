"""How a process finds out what started it, from its variables alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ktrainer.distributed import SingleWorld, current_world, open_world, world_factory
from ktrainer.distributed.world_factory import (
    check_size,
    launched,
    launcher,
)
from ktrainer.errors import SetupError
from tests.dist.harness.group import ROOT

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_CONTROLLER": "gloo"}


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        pytest.param({}, "single", id="plain python"),
        pytest.param(OPEN_MPI, "mpi", id="Open MPI"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "1"}, "mpi", id="Open MPI, one rank"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpi", id="PMI"),
        pytest.param({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}, "mpi", id="Intel MPI"),
        pytest.param(SRUN, "mpi", id="srun"),
        pytest.param({**SRUN, "SLURM_NTASKS": "1"}, "single", id="srun, one task"),
        pytest.param(SBATCH, "single", id="the shell of sbatch"),
        pytest.param({**SBATCH, **OPEN_MPI}, "mpi", id="mpirun in sbatch"),
        pytest.param(HOROVODRUN, "horovod", id="horovodrun --gloo"),
        pytest.param({**HOROVODRUN, **OPEN_MPI}, "mpi", id="horovodrun --mpi"),
        pytest.param({**SBATCH, **HOROVODRUN}, "horovod", id="horovodrun --gloo in sbatch"),
        pytest.param({"HOROVOD_TIMELINE": "x"}, "single", id="a setting of Horovod"),
    ],
)
def test_launcher(environ: dict[str, str], kind: str) -> None:
    assert launcher(environ) == kind


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        pytest.param({}, None, id="plain python"),
        pytest.param(OPEN_MPI, ("OMPI_COMM_WORLD_SIZE", 2), id="Open MPI"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("PMI_SIZE", 2), id="PMI"),
        pytest.param({"MPI_LOCALNRANKS": "2"}, None, id="Intel MPI, which says so of a node"),
        pytest.param(SRUN, ("SLURM_NTASKS", 2), id="srun"),
        pytest.param(SBATCH, None, id="the shell of sbatch"),
        pytest.param({**SRUN, **OPEN_MPI}, ("OMPI_COMM_WORLD_SIZE", 2), id="mpirun in a step"),
    ],
)
def test_what_the_launcher_says(environ: dict[str, str], said: tuple[str, int] | None) -> None:
    assert launched(environ) == said
    check_size(said[1] if said else 7, environ)


@pytest.mark.parametrize(("environ", "remedy"), [(SRUN, "--mpi=pmix"), (OPEN_MPI, "mpirun")])
def test_processes_that_mpi_does_not_connect(environ: dict[str, str], remedy: str) -> None:
    with pytest.raises(SetupError, match=f"2 processes were started.*sees 1: .*{remedy}"):
        check_size(1, environ)


@pytest.mark.parametrize(
    ("ranks", "here", "given", "then"),
    [("2", "2", None, "^ofi"), ("4", "2", None, None), ("2", "2", "self,sm", "self,sm")],
)
def test_mpi_looks_for_no_networks_on_one_host(
    monkeypatch: pytest.MonkeyPatch, ranks: str, here: str, given: str | None, then: str | None
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", ranks)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", here)
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    if given:
        monkeypatch.setenv("OMPI_MCA_btl", given)
    with world_factory._without_ofi_transport():
        assert os.environ.get(world_factory._TRANSPORTS) == then
    assert os.environ.get(world_factory._TRANSPORTS) == given


def test_a_copy_that_is_alone_does_not_start(tmp_path: Path) -> None:
    code = "from ktrainer.distributed import open_world; open_world(); print('trains alone')"
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**plain, **SRUN, "PYTHONPATH": str(ROOT), "OMPI_MCA_ess_singleton_isolated": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "2 processes were started (SLURM_NTASKS), but MPI in this one sees 1" in done.stderr


def test_one_world_whose_deadline_the_last_call_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_factory, "_current", None)
    world = open_world(5)
    assert type(world) is SingleWorld
    assert open_world(3) is current_world() is world
    assert world.deadline == 3


def test_horovod_gives_up_when_its_world_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limits are read once, by `init`: those of the deadline asked for, not of the default."""
    limits: dict[str, str] = {}

    def init(process_sets: Any = None) -> None:
        limits.update({key: os.environ[key] for key in os.environ if "STALL" in key})

    horovod = ModuleType("horovod")
    fake = {"is_initialized": lambda: False, "init": init, "tensorflow": horovod}
    places = dict.fromkeys(("rank", "size", "local_rank", "local_size"), lambda: 1)
    horovod.__dict__.update({**fake, **places})
    monkeypatch.setitem(sys.modules, "horovod", horovod)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", horovod)
    monkeypatch.setattr(world_factory, "_current", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a world may set its own
    for key, value in HOROVODRUN.items():
        monkeypatch.setenv(key, value)
    world = open_world(1000)
    world.close()
    assert (world.name, world.deadline) == ("horovod", 1000)
    assert limits["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "1000"
