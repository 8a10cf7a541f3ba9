"""Clusters as users start them: by the launcher, or with a TF_CONFIG of their own."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.tf_distribute.launching import (
    LAUNCH,
    MULTI_WORKER,
    QUIET,
    Start,
    heard_from_outside,
    task,
    wait_for,
)
from tests.world.test_cluster import free_ports

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGSTOP, "PeerLost: rank 0 lost rank 1 (127.0.0.1:"),
        (signal.SIGKILL, "rank 1 was ended by signal 9"),
    ],
)
def test_a_worker_that_stops_or_is_killed_is_named(
    start: Start, script: Path, number: int, says: str
) -> None:
    command = (*LAUNCH, "-n", 2, script, *MULTI_WORKER, *QUIET)
    launcher = start(*command, "data.batch_size=16", "trainer.epochs=9")
    wait_for(launcher, "ready")
    assert heard_from_outside(launcher) == []
    task(launcher, "OMPI_COMM_WORLD_RANK", "1").send_signal(number)
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert launcher.returncode != 0
    assert says in errors or "No answer from rank 1" in errors


def test_a_sum_that_takes_longer_than_it_may(start: Start, script: Path) -> None:
    """A process that lives, and whose TensorFlow answers, but that does not come."""
    command = (*LAUNCH, "-n", 2, script, *MULTI_WORKER, *QUIET, "backend.timeout=1")
    launcher = start(*command, "data.batch_size=16", LATE="1")
    wait_for(launcher, "ready")
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert launcher.returncode != 0
    assert "rank 0 raised DeadlineExceeded" in errors
    assert "'a sum over processes' for other ranks. No answer from rank 1" in errors


def test_processes_with_a_tf_config_of_their_own(start: Start, script: Path) -> None:
    """Without MPI; the same weights as in one process."""
    one = start(sys.executable, script, "backend=local", *QUIET, "data.batch_size=16")
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    both = [
        start(
            sys.executable,
            script,
            *(*MULTI_WORKER, *QUIET, "data.batch_size=16"),
            TF_CONFIG=json.dumps(
                {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
            ),
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in (*both, one)]
    ends = [_end(out, errors) for out, errors in outputs]
    assert ends[0] == ends[1]
    assert ends[0][0] == ends[2][0] == 60
    assert ends[0][1] == pytest.approx(ends[2][1], rel=1e-5)


def test_a_trainer_that_is_made_too_late(start: Start, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import tensorflow as tf\nfrom ktrainer import Trainer\n"
        "tf.data.Dataset.range(3)\nTrainer.from_cli()\n"
    )
    _, errors = start(sys.executable, late, *MULTI_WORKER, *QUIET).communicate(timeout=60)
    assert "SetupError: TensorFlow was already running" in errors
    assert "Make the Trainer first" in errors


def _end(out: str, errors: str) -> tuple[int, list[float]]:
    """What a process said at the end: its step and weights."""
    assert "end " in out, errors
    step, _, weights = out.rpartition("end ")[2].partition(" ")
    return int(step), json.loads(weights)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "how many processes?"),
        (("-n", 2, "--workers", 2), "give one or the other"),
        (("--workers", 2), "for backend.strategy=parameter_server"),
    ],
)
def test_numbers_of_processes_that_make_no_sense(
    start: Start, script: Path, words: tuple[object, ...], says: str
) -> None:
    done = start(*LAUNCH, *words, script, "backend=data_parallel")
    _, errors = done.communicate(timeout=60)
    assert (done.returncode, says in errors) == (2, True), errors
