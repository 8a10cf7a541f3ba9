"""Clusters with parameter servers, started by the launcher."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness.group import ROOT
from tests.tf_distribute.launching import (
    LAUNCH,
    QUIET,
    SERVERS,
    Start,
    heard_from_outside,
    task,
    wait_for,
)
from tests.world.test_cluster import free_ports

HERE = Path(__file__).parent


def found_by(start: Start, folder: Path, part: str, servers: int) -> Any:
    """What the coordinator of two workers has found."""
    command = [*LAUNCH, "--workers", 2, "--servers", servers, HERE / "servers_script.py"]
    command += [folder, part]
    done = start(*command, PYTHONPATH=str(ROOT))
    said = done.communicate(timeout=280)
    assert done.returncode == 0, said
    return json.loads((folder / "found.json").read_text())


def test_trainings(start: Start, tmp_path: Path) -> None:
    found = found_by(start, tmp_path, "joined", 2)
    print(found["cases"])
    assert max(found["cases"].values()) <= 1e-10
    for ours, reference in found["logs"].values():
        assert list(ours) == list(reference)
        for key, values in reference.items():
            assert ours[key] == pytest.approx(values, rel=1e-9), key
    free = found["asynchronous"]
    assert (free["steps"], free["counted"]) == (8 * 44, [397.0])  # of validation, the last one
    assert free["right"] > free["one process"] - 0.02  # 8 of 397 images
    assert free["evaluated"]["accuracy"] == pytest.approx(free["right"])
    assert free["logs"]["val_accuracy"] == pytest.approx(free["right"])
    assert found["cut"]["difference"] < 1e-5
    assert "ShardedVariable" in found["cut"]["kinds"]
    assert found["resumed"] < 1e-5


def test_models_precisions_and_callbacks(start: Start, tmp_path: Path) -> None:
    found = found_by(start, tmp_path, "contracts", 1)
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join([*wrong, *wrong.values()])
    assert len(found) > 15


def test_a_worker_that_is_killed_is_started_again(start: Start, script: Path) -> None:
    command = (*LAUNCH, "--workers", 2, "--servers", 1, script, *SERVERS, *QUIET)
    launcher = start(*command, "data.batch_size=16", "trainer.epochs=3")
    wait_for(launcher, "ready")
    assert heard_from_outside(launcher) == []
    task(launcher, "TF_CONFIG", '"worker", "index": 1').kill()
    out, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    assert "worker 1 was ended by signal 9 (SIGKILL); starting it again" in errors
    assert "[0] end 180 " in out


@pytest.mark.parametrize(
    ("number", "victim", "says"),
    [
        (signal.SIGKILL, '"ps", "index": 0', "the coordinator lost ps 0 (127.0.0.1:"),
        (
            signal.SIGSTOP,
            '"worker", "index": 0',
            "the coordinator does not hear of worker 0 (127.0.0.1:",
        ),
    ],
)
def test_a_server_that_is_killed_or_a_worker_that_stops_is_named(
    start: Start, script: Path, number: int, victim: str, says: str
) -> None:
    command = (*LAUNCH, "--workers", 1, "--servers", 1, script, *SERVERS, *QUIET)
    launcher = start(*command, "data.batch_size=16", "trainer.epochs=9")
    wait_for(launcher, "ready")
    task(launcher, "TF_CONFIG", victim).send_signal(number)
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert launcher.returncode == 1
    assert f"PeerLost: {says}" in errors


def test_a_worker_that_is_missing_at_the_start_is_named(start: Start, script: Path) -> None:
    chief, worker, server = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    words = (*SERVERS, *QUIET, "backend.start_timeout=2")
    began = time.monotonic()
    _, errors = start(sys.executable, script, *words, TF_CONFIG=config).communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert f"Not there: worker 0 ({worker}), ps 0 ({server})" in errors
    assert "backend.start_timeout" in errors
