"""Clusters with parameter servers, started by the launcher."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness.group import ROOT
from tests.dist.test_ragged_outputs import predicted
from tests.distributed.test_cluster_world import free_ports
from tests.tf_distribute.launching import (
    LAUNCH,
    QUIET,
    SERVERS,
    Start,
    heard_from_outside,
    task,
    wait_for,
)

HERE = Path(__file__).parent


def found_by(start: Start, folder: Path, part: str, servers: int) -> Any:
    """What the coordinator of two workers has found."""
    command = [*LAUNCH, "--workers", 2, "--servers", servers, HERE / "servers_script.py"]
    command += [folder, part]
    done = start(*command, PYTHONPATH=str(ROOT))
    said = done.communicate(timeout=280)
    assert done.returncode == 0, said
    return json.loads((folder / "found.json").read_text())


@pytest.mark.exhaustive
def test_trainings(start: Start, tmp_path: Path) -> None:
    found = found_by(start, tmp_path, "joined", 2)
    print(found["cases"])
    assert max(found["cases"].values()) <= 1e-10
    assert found["tables in pieces"] <= 5e-10  # without accumulation, too, it is 2e-10
    for ours, reference in found["logs"].values():
        assert list(ours) == list(reference)
        for key, values in reference.items():
            assert ours[key] == pytest.approx(values, rel=1e-9), key
    free = found["asynchronous"]
    assert (free["steps"], free["counted"]) == (8 * 44, [397.0])  # of validation, the last one
    assert free["right"] > free["one process"] - 0.02  # 8 of 397 images
    assert free["evaluated"]["accuracy"] == pytest.approx(free["right"])
    assert free["logs"]["val_accuracy"] == pytest.approx(free["right"])
    assert found["left"] == 320
    for cut in found["cut"]:
        assert cut["difference"] < 1e-5
        assert "ShardedVariable" in cut["kinds"]
    assert max(found["resumed"]) < 1e-5


@pytest.mark.exhaustive
def test_loops_of_a_users_own(start: Start, tmp_path: Path) -> None:
    found = found_by(start, tmp_path, "loops", 1)
    print({name: f"{gap:.1e}" for name, gap in found["gaps"].items()})
    assert max(found["gaps"].values()) < 1e-12
    sums, total, at_once = found["scheduled"]
    assert sums == [sum(range(first, first + 4)) for first in range(0, 48, 4)]
    assert total == sum(range(48))
    assert at_once == 2
    assert found["counted"] == [240.0] * 3
    assert found["reset"].startswith("ModelError: a step of Resetting resets a metric (loss/")
    assert "call trainer.run or schedule outside of it" in found["in a function"]
    assert found["ragged"] == list(predicted("keras"))


@pytest.mark.exhaustive
def test_models_precisions_and_callbacks(start: Start, tmp_path: Path) -> None:
    found = found_by(start, tmp_path, "contracts", 1)
    wrong = {name: text for name, text in found.items() if text}
    assert not wrong, "\n".join([*wrong, *wrong.values()])
    assert len(found) > 15


@pytest.mark.exhaustive
def test_workers_and_servers_that_fail_or_stop(start: Start, tmp_path: Path) -> None:
    """A lost worker is restarted; a stopped process, or one that held weights, is named."""
    command = [*LAUNCH, "--workers", 2, "--servers", 1, HERE / "faults_script.py", tmp_path]
    launcher = start(*command, PYTHONPATH=str(ROOT))
    _, errors = launcher.communicate(timeout=200)
    assert (launcher.returncode, (tmp_path / "found.json").exists()) == (1, True), errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert "worker 1 was ended by signal 9 (SIGKILL); starting it again" in errors
    # Of 60 batches, five went before the rollback, and were counted no more.
    back = found["rolled back"]
    (said,) = back.pop("said")
    assert "back to the checkpoint of step 8" in said
    assert back == {"running": 0, "steps": 55, "applied": 55, "counted": 47 * 16}
    # The update that was applied before the worker died is applied again, and counted once.
    assert found["killed"] == {"sent": 1, "steps": 60, "applied": 61, "counted": 960}
    for name, who in (("stopped", "worker 1"), ("server", "ps 0")):
        said, seconds = found[name]
        assert said.startswith(f"the coordinator receives no heartbeat from {who} (127.0.0.1:")
        assert seconds < 40
    assert "PeerLost: the coordinator receives no heartbeat from ps 0 (127.0.0.1:" in errors
    assert "in 'a read from the servers'" in errors


@pytest.mark.exhaustive
def test_a_server_that_is_killed_is_named(start: Start, script: Path) -> None:
    command = (*LAUNCH, "--workers", 1, "--servers", 1, script, *SERVERS, *QUIET)
    launcher = start(*command, "data.batch_size=16", "trainer.epochs=9")
    wait_for(launcher, "ready")
    assert heard_from_outside(launcher) == []
    task(launcher, "TF_CONFIG", '"ps", "index": 0').kill()
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 40
    assert launcher.returncode == 1
    assert "PeerLost: the coordinator lost ps 0 (127.0.0.1:" in errors


@pytest.mark.exhaustive
def test_a_worker_that_is_missing_at_the_start_is_named(start: Start, script: Path) -> None:
    chief, worker, server = (f"127.0.0.1:{port}" for port in free_ports(3))
    cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
    config = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    words = (*SERVERS, *QUIET, "backend.start_timeout=2")
    began = time.monotonic()
    _, errors = start(script, *words, TF_CONFIG=config).communicate(timeout=60)
    assert time.monotonic() - began < 50
    assert f"Not there: worker 0 ({worker}), ps 0 ({server})" in errors
    assert "backend.start_timeout" in errors


@pytest.mark.exhaustive
def test_a_coordinator_that_is_silent_or_lost(start: Start, script: Path) -> None:
    jobs = ("chief", "worker", "ps")
    met = {job: [f"127.0.0.1:{port}"] for job, port in zip(jobs, free_ports(3), strict=True)}

    def begin(job: str, cluster: dict[str, list[str]], *words: str) -> subprocess.Popen[str]:
        config = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
        # The worker's signals are looked at.
        return start(script, *SERVERS, *QUIET, *words, fork=job != "worker", TF_CONFIG=config)

    coordinator, worker = begin("chief", met), begin("worker", met)  # which wait for the server
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        server = begin("ps", {**met, "chief": [address]}, "backend.start_timeout=1")
        _, errors = server.communicate(timeout=90)
    assert server.returncode == 1
    assert f"The coordinator at {address} does not listen, or does not answer" in errors
    wait_until_greeted(worker)
    coordinator.kill()
    _, errors = worker.communicate(timeout=90)
    assert worker.returncode == 1
    assert f"PeerLost: worker 0 lost the coordinator at {met['chief'][0]}" in errors, errors


def wait_until_greeted(process: subprocess.Popen[str]) -> None:
    """Until the coordinator has greeted a worker, which from then on catches SIGTERM."""
    while process.poll() is None:
        caught = Path(f"/proc/{process.pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1])


def test_a_sum_with_an_earlier_value_is_no_addition() -> None:
    """As of a step that goes back a part of the way that an optimizer has gone."""
    import keras
    import tensorflow as tf

    from ktrainer.backends.tf_distribute.parameter_server.sharded_variables import adding_at_once

    variable = keras.Variable(3.0)

    @tf.function
    def step() -> None:
        before = tf.identity(variable.value)
        variable.assign(variable + 1.0)
        variable.assign(before + 0.5 * (variable - before))

    with adding_at_once():
        step()
    assert float(variable) == 3.5
