"""A stage that raises ends all; a stage that stops is named by those that wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktrainer.errors import DeadlineExceeded
from ktrainer.launch.mpirun_command import find_mpirun, mpi_environment, mpirun_command
from tests.distributed.collectives import wait_for_files
from tests.pipeline.trained import classes, data_of
from tests.processes import run, warm_python

SCRIPT = """
import os, signal
import keras, numpy as np, tensorflow as tf
from ktrainer import Trainer

calls = 0

def third_time(x):
    global calls
    calls += 1
    if calls == 5:
        FAIL
    return x

class Fails(keras.layers.Layer):
    def call(self, x):
        y = tf.py_function(third_time, [tf.stop_gradient(x)], x.dtype)
        return x + tf.ensure_shape(tf.stop_gradient(y), x.shape)

def build():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((6,)), dense(8), dense(8), Fails(), dense(3)])
    model.compile("sgd", "mse")
    return model

Trainer.from_cli().fit(build, (np.zeros((64, 6), "float32"), np.zeros((64, 3), "float32")))
"""
WORDS = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2")
QUIET = ("logging.progress=none", "logging.csv=false", "data.batch_size=16")


LAUNCH = ["-m", "ktrainer.cli.main", "launch", "--all-ranks", "-n", "2"]


def _started(folder: Path, command: list[str], fail: str, stages: str) -> Any:
    """A run of two stages, one of which does `fail` in the third step."""
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("FAIL", fail))
    words = [script, *WORDS, *QUIET, f"backend.stages={stages}"]
    return run([*command, *words], folder, 120, **mpi_environment())


@pytest.mark.exhaustive
def test_an_exception_in_a_stage_ends_all_with_its_traceback(tmp_path: Path) -> None:
    fail = 'raise RuntimeError("a stage that fails on purpose")'
    done = _started(
        tmp_path, [warm_python(), *LAUNCH], fail, "{0: 'dense|dense_1|fails', 1: dense_2}"
    )
    assert done.returncode not in (0, None), done.stdout
    assert "rank 0 raised UnknownError; all others were ended:\nTraceback" in done.stderr
    assert "RuntimeError: a stage that fails on purpose" in done.stderr


@pytest.mark.exhaustive
def test_a_stage_that_is_killed_in_the_middle_of_a_schedule_ends_all(tmp_path: Path) -> None:
    """Where mpirun does not end all of its own accord, the stage that waits says for whom."""
    more = ["--with-ft", "ulfm"]
    root = os.geteuid() == 0
    mpirun = mpirun_command(2, [warm_python()], mpirun=find_mpirun(), root=root, more=more)
    kill, stages = "os.kill(os.getpid(), signal.SIGKILL)", "{0: dense, 1: 'dense_.*|fails'}"
    done = _started(tmp_path, mpirun, kill, stages)
    waits = "in 'gradient 1->0 of microbatch 0 from rank 1"
    assert f"PeerLost: rank 0 lost rank 1 at step 3 {waits}" in done.stderr


def _train(where: str, folder: str) -> None:
    """Train two stages of which the last fails, is late or stops `where` it says."""
    import time

    import keras
    import tensorflow as tf

    from ktrainer import Trainer

    calls, pid, told = [], Path(folder, "pid"), Path(folder, "told")

    def fifth(x: Any) -> Any:
        calls.append(x)
        if len(calls) == 5 and where == "stop":
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1)  # until the main thread, which takes the signal, has a core
        elif len(calls) == 5:
            raise RuntimeError(f"fails on purpose in the {where}")
        return x

    def in_python(x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(fifth, [x], x.dtype), x.shape)

    class Middle(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if where == "backward pass":
                return tf.custom_gradient(lambda x: (tf.identity(x), in_python))(x)
            return x + tf.stop_gradient(in_python(x)) if where == "stop" else x

    class Deadline(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            trainer.world.deadline = 5.0 if where == "stop" else 4.0  # the first batch compiled
            if (where, batch, trainer.world.rank) == ("between steps", 1, 1):
                wait_for_files(told, seconds=30)

    def build() -> Any:
        constraint = in_python if where == "update" else None
        first, *dense = [
            keras.layers.Dense(n, kernel_constraint=constraint if i else None, name=f"dense_{i}")
            for i, n in enumerate((8, 8, 3))
        ]
        model = keras.Sequential([keras.Input((6,)), first, Middle(name="middle"), *dense])
        model.compile("sgd", classes())
        return model

    stages = "backend.stages={0: dense_0, 1: 'dense_[12]|middle'}"
    try:
        with Trainer(overrides=[*WORDS, *QUIET, stages], callbacks=[Deadline()]) as trainer:
            trainer.fit(build, data_of("plain", 96))
    finally:
        told.touch()
        if where == "stop" and trainer.world.rank == 0:
            os.kill(int(pid.read_text()), signal.SIGCONT)


@pytest.mark.quick("update")
@pytest.mark.parametrize("where", ["backward pass", "update", "between steps", "stop"])
def test_a_stage_that_fails_anywhere_is_named_within_the_deadline(
    ranks: Callable[..., Any], tmp_path: Path, where: str
) -> None:
    """`test_an_exception_in_a_stage` holds that an exception then ends all."""
    first, second = ranks(2).outcomes(_train, where, str(tmp_path))
    assert isinstance(first.error, DeadlineExceeded), first
    assert first.error.seconds == (5 if where == "stop" else 4)
    assert "rank 1" in str(first.error)
    if where in ("backward pass", "update"):
        assert f"RuntimeError: fails on purpose in the {where}" in str(second.error)
    if where != "stop":
        assert "No answer from rank 1" in str(first.error)
    if where == "between steps":
        assert "at step 2" in str(first.error)
    else:
        assert second.error is not None
