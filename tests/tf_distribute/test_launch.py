"""Clusters as users start them: by the launcher, or with a TF_CONFIG of their own."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.test_cluster_world import free_ports
from tests.tf_distribute.launching import (
    LAUNCH,
    MULTI_WORKER,
    QUIET,
    Start,
    heard_from_outside,
    task,
    wait_for,
)

HERE = Path(__file__).parent


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_ends_all(start: Start, script: Path) -> None:
    command = (*LAUNCH, "-n", 2, script, *MULTI_WORKER, *QUIET)
    launcher = start(*command, "data.batch_size=16", "trainer.epochs=9")
    wait_for(launcher, "ready")
    assert heard_from_outside(launcher) == []
    task(launcher, "OMPI_COMM_WORLD_RANK", "1").kill()
    began = time.monotonic()
    _, errors = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 40
    assert launcher.returncode != 0
    assert "rank 1 was ended by signal 9" in errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGSTOP, 1), (signal.SIGKILL, 0)])
def test_a_worker_names_the_one_that_stops_or_is_lost(
    start: Start, script: Path, number: int, victim: int
) -> None:
    """Without a launcher that would say it: in a sum, which TensorFlow carries out."""
    fault = {"TEST_RANK": str(victim), "TEST_SIGNAL": str(int(number))}
    # A process that has stopped is missed after 8 s: before the sum has taken too long.
    words = (script, *MULTI_WORKER, *QUIET, "data.batch_size=16", "backend.timeout=60")
    both = [start(*words, **env, **fault) for env in by_tf_config()]
    other = both[1 - victim]
    try:
        wait_for(other, "ready")
        began = time.monotonic()
        _, errors = other.communicate(timeout=60)
        assert time.monotonic() - began < 40
    finally:
        both[victim].kill()  # it may have stopped, and would not end otherwise
    assert other.returncode != 0
    assert f"PeerLost: rank {1 - victim} lost rank {victim} (127.0.0.1:" in errors, errors
    assert "in a sum over processes" in errors


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_sum_that_takes_longer_than_it_may(start: Start, script: Path) -> None:
    """A process that lives, and whose TensorFlow answers, but that does not come."""
    command = (*LAUNCH, "-n", 2, script, *MULTI_WORKER, *QUIET, "backend.timeout=1")
    for _ in range(3):
        launcher = start(*command, "data.batch_size=16", LATE="1")
        wait_for(launcher, "ready")
        began = time.monotonic()
        _, errors = launcher.communicate(timeout=60)
        assert time.monotonic() - began < 40
        assert launcher.returncode != 0
        # TensorFlow uses what it has freed, and crashes at times: see the page of limits.
        crashed = re.search("rank 0 was ended by signal (6|11)", errors)
        if not crashed or time.monotonic() - began < 1:
            break
    assert "rank 0 raised DeadlineExceeded" in errors, errors
    assert "rank 0 waited 1 s" in errors, errors
    assert "'a sum over processes' for other ranks. No answer from rank 1" in errors, errors


@pytest.mark.exhaustive
def test_tasks_of_slurm_and_a_peer_that_does_not_come(start: Start, script: Path) -> None:
    """Without MPI; the same weights as in one process."""
    words = (script, *QUIET, "data.batch_size=16")
    one = start(*words, "backend=local")
    both = [start(*words, *MULTI_WORKER, **env) for env in by_slurm()]
    alone = by_tf_config()[0]
    lonely = start(*words, *MULTI_WORKER, "backend.start_timeout=2", **alone)
    outputs = [process.communicate(timeout=120) for process in (*both, one)]
    ends = [_end(out, errors) for out, errors in outputs]
    assert ends[0] == ends[1]
    assert ends[0][0] == ends[2][0] == 60
    assert ends[0][1] == pytest.approx(ends[2][1], rel=1e-5)
    _, errors = lonely.communicate(timeout=60)
    absent = json.loads(alone["TF_CONFIG"])["cluster"]["worker"][1]
    assert lonely.returncode != 0
    assert f"Not there: rank 1 ({absent})" in errors


def by_tf_config() -> list[dict[str, str]]:
    """The environments of two workers that know one another by TF_CONFIG."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    configs = [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        for index in range(2)
    ]
    return [{"TF_CONFIG": json.dumps(config)} for config in configs]


def by_slurm() -> list[dict[str, str]]:
    """Those of the two tasks of a Slurm step on one host."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "KTRAINER_PORT": str(free_ports(2)[0])}
    return [{**step, "SLURM_PROCID": str(rank)} for rank in range(2)]


@pytest.mark.exhaustive
def test_a_trainer_that_is_made_too_late(start: Start, tmp_path: Path) -> None:
    late = tmp_path / "late.py"
    late.write_text(
        "import tensorflow as tf\nfrom ktrainer import Trainer\n"
        "tf.data.Dataset.range(3)\nTrainer.from_cli()\n"
    )
    _, errors = start(late, *MULTI_WORKER, *QUIET).communicate(timeout=60)
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
