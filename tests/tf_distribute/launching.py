"""Start clusters as users do; fixtures `script` and `start`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.dist.harness.group import ROOT
from tests.processes import warm_python

HERE = Path(__file__).parent
LAUNCH = ("-m", "ktrainer.cli.main", "launch", "--all-ranks")
QUIET = ("logging.csv=false", "world.deadline=10")
MULTI_WORKER = ("backend=tf_distribute", "backend.strategy=multi_worker_mirrored")
SERVERS = ("backend=tf_distribute", "backend.strategy=parameter_server")

SCRIPT = """
import os, sys, time
import keras, numpy as np
from ktrainer import Trainer

class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5 and os.environ.get("TEST_RANK") == str(trainer.world.rank):
            os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))  # the others enter a sum
        if batch == 6 and os.environ.get("LATE") == str(trainer.world.rank):
            time.sleep(60)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            print("ready", flush=True)
        if batch >= 4:
            time.sleep(0.02)

def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Slow()])
x = np.random.default_rng(0).normal(size=(16 * 60, 8)).astype("float32")
trainer.fit(build, (x, x[:, :3]))
weights = [float(np.abs(v.numpy()).sum()) for v in trainer.model.variables]
print("end", trainer.progress.step, weights, flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start(*words, **environment)` starts Python, which ends with the test; with `fork=False`
    the process that is started is the one that computes."""
    with ExitStack() as stack:

        def popen(*words: object, fork: bool = True, **env: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [warm_python(**env) if fork else sys.executable, *map(str, words)],
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            return process

        yield popen


Start = Callable[..., subprocess.Popen[str]]


def task(launcher: subprocess.Popen[str], variable: str, value: str) -> psutil.Process:
    """The process under the launcher in whose environment `value` is in `variable`."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with psutil.Process(process.pid).oneshot():
            found = process.environ().get(variable, "")
        if value in found and "ktrainer.launch.rank_process" in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no process with {value} in {variable}")


def heard_from_outside(launcher: subprocess.Popen[str]) -> list[str]:
    """The addresses other than loopback where processes under the launcher listen."""
    return [
        f"{process.name()} {connection.laddr}"
        for process in psutil.Process(launcher.pid).children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]


def wait_for(launcher: subprocess.Popen[str], text: str) -> None:
    for line in launcher.stdout or ():
        if text in line:
            return
    raise AssertionError(launcher.communicate()[1])
