"""Scripts under launchers that are not ours: `horovodrun` without MPI, and plain `mpirun`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ktrainer.launch.mpirun_command import find_mpirun
from ktrainer.launch.process_tree import wait_until_ended
from tests.dist.harness.group import ROOT
from tests.distributed import collectives
from tests.processes import warm_python

Script = Callable[[str], Path]

SECONDS = 120.0

FIT = """\
import hashlib, pathlib
import keras
import numpy as np
from ktrainer import Trainer

def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"),
                              keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model

x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
# The audit would find ranks that differ; here the test does.
quiet = {"logging": {"progress": "none", "csv": False}, "health": {"audit_every": None}}
with Trainer.from_cli(defaults=quiet) as trainer:
    trainer.fit(build, (x, x[:, :1] ** 2))
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in trainer.model.weights))
    world = trainer.world
    pathlib.Path(f"fitted-{world.rank}").write_text(
        f"{world.name} {trainer.plan.engine} {world.size} {trainer.progress.step} "
        + digest.hexdigest())
"""

COLLECTIVES = """\
import os, pickle
from ktrainer.distributed import open_world
from ktrainer.errors import PeerLost
from tests.distributed import collectives

results = (collectives.reductions("horovod"), collectives.python_numbers("horovod"),
           collectives.messages("horovod"), collectives.barrier("horovod"))
with open(f"results-{os.environ['HOROVOD_RANK']}", "wb") as file:
    pickle.dump(results, file)

world = open_world(30)
world.barrier()
if world.rank == 1:
    os._exit(0)
try:
    world.broadcast("x", what="the news")
except PeerLost as error:
    print("lost:", error)
else:
    raise AssertionError("rank 1 was there")
world.close()
"""

LATE = """\
import time
from ktrainer.distributed import open_world

world = open_world(30)
world.barrier()
world.deadline = 1
if world.rank == 1:
    time.sleep(60)
    print("rank 1 was left alone")
world.barrier("the end")
"""


def horovodrun(*words: object) -> list[str]:
    """Two ranks on this host, through Gloo alone."""
    program = Path(sysconfig.get_path("scripts")) / "horovodrun"
    return [str(program), "--gloo", "-np", "2", warm_python(), *map(str, words)]


def mpirun(*words: object) -> list[str]:
    """Two ranks as a user may start them, without what `ktrainer run` sets."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [find_mpirun(), *root, "--oversubscribe", "-np", "2", warm_python(), *map(str, words)]


def finish(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in a folder to its end: its exit code and output. Leaves nothing behind."""
    with (folder / "output").open("wb") as output:
        process = psutil.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(SECONDS)
        finally:
            tree = [*process.children(recursive=True), process] if process.is_running() else []
            for one in tree:
                one.kill()
            wait_until_ended(tree, 10)
    return code, (folder / "output").read_text(errors="replace")


def check_fitted(folder: Path, start: str) -> None:
    """Each rank trained on its own half of every batch: weights are equal only if shared."""
    one, other = ((folder / f"fitted-{rank}").read_text() for rank in range(2))
    assert one == other
    assert one.startswith(start)


WORDS = ("backend=data_parallel", "trainer.epochs=2", "data.batch_size=16")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_script_trains_on_both_ranks_together(script: Script, tmp_path: Path) -> None:
    code, output = finish(mpirun(script(FIT), *WORDS), tmp_path)
    assert code == 0, output
    check_fitted(tmp_path, "mpi mpi 2 8 ")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.horovod
def test_horovod_without_mpi(script: Script, tmp_path: Path) -> None:
    """Ranks train together, then call each collective, then one is lost."""
    code, output = finish(horovodrun(script(FIT + COLLECTIVES), *WORDS), tmp_path)
    assert code == 0, output
    check_fitted(tmp_path, "horovod horovod 2 8 ")
    results = [pickle.loads((tmp_path / f"results-{rank}").read_bytes()) for rank in range(2)]
    reductions, numbers, messages, barriers = zip(*results, strict=True)
    collectives.check_reductions(reductions)
    collectives.check_python_numbers(list(numbers))
    collectives.check_messages(messages)
    assert max(came for came, _ in barriers) <= min(left for _, left in barriers)
    assert "lost: rank 0 lost a peer at step 8 in 'the news'" in output


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.horovod
def test_an_uncaught_deadline_ends_all(script: Script, tmp_path: Path) -> None:
    code, output = finish(horovodrun(script(LATE)), tmp_path)
    assert code == 1, output
    assert "DeadlineExceeded: rank 0 waited 1 s at step 0 in 'the end'" in output
    assert "rank 1 was left alone" not in output
