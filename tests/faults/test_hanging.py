"""Row 10: who hangs or has stopped is named, and where it is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ktrainer.distributed.stack_dump import enable_stack_dumps, stack_dumps
from ktrainer.errors import DeadlineExceeded
from tests.distributed.collectives import opened
from tests.launch.conftest import launch, script

__all__ = ["launch", "script"]

HANGS = """
import threading
import keras, numpy as np
from ktrainer import Callback, Trainer
from ktrainer.distributed import stack_dump

stack_dump._SECONDS = 20.0  # for an answer

def lost_in_thought():
    threading.Event().wait(60)

class Hangs(Callback):
    def on_step_begin(self, step):
        if step == 2:
            self.world.deadline = 4.0  # not for the first steps: one of them compiled
            if self.world.rank == 1:
                lost_in_thought()

def build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Hangs()])
trainer.fit(build, (np.zeros((64, 6), "float32"), np.zeros((64, 3), "float32")))
"""


def test_row_10_a_rank_that_hangs_says_where(
    launch: Callable[..., subprocess.CompletedProcess[str]], script: Callable[[str], Path]
) -> None:
    words = ("backend=data_parallel", "data.batch_size=16", "logging.progress=none")
    done = launch("-n", 2, script(HANGS), *words, warm=True)
    assert done.returncode == 1, done.stdout
    said = done.stderr
    assert "rank 0 waited 4 s at step 3 in 'all-reduce of gradients'" in said, said
    assert "No answer from rank 1" in said
    where = said.partition("\nrank 1 (process ")[2]
    assert re.match(r"\d+\) is at:\n", where), said
    assert 'script.py", line 10 in lost_in_thought' in where
    assert where.count("most recent call first") >= 2, "all threads"
    assert "script.py\", line 17 in on_step_begin" in where  # fmt: skip


def stops(deadline: float) -> None:
    """Rank 0 waits for rank 1, which has been stopped by SIGSTOP."""
    with opened("mpi") as world:
        pid = world.broadcast(os.getpid(), 1)
        if world.rank == 1:
            threading.Event().wait(deadline)
            return
        os.kill(pid, signal.SIGSTOP)
        world.deadline, world.step = deadline, 7
        try:
            world.allgather(1, "never")
        finally:
            os.kill(pid, signal.SIGCONT)


def test_row_10_a_rank_that_has_stopped_cannot(ranks: Callable[..., Any]) -> None:
    error = ranks(2).outcomes(stops, 1.0)[0].error
    assert isinstance(error, DeadlineExceeded)
    assert "rank 0 waited 1 s at step 7 in 'never'" in str(error)
    assert re.search(r"\nrank 1 \(process \d+\) is stopped \(state T\)", str(error)), error


def test_row_10_a_process_that_has_ended_or_is_elsewhere() -> None:
    here = enable_stack_dumps()
    with subprocess.Popen(["sleep", "60"]) as process:
        pid, born = process.pid, psutil.Process(process.pid).create_time()
        process.kill()
    gone = type(here)(pid, born, here.where, 5)
    far = type(here)(here.pid, here.born, "another-host 1", 5)
    other = type(here)(here.pid, here.born - 60, here.where, 5)  # the number was given again
    text = stack_dumps({0: here, 1: gone, 2: far, 3: other, 4: here}, [1, 2, 3, 4])
    assert f"rank 1 (process {pid}) has ended\n" in text
    assert "is on another host: another-host\n" in text
    assert f"rank 3 (process {here.pid}) has ended\n" in text
    assert "in test_row_10_a_process_that_has_ended_or_is_elsewhere" in text.partition("rank 4")[2]
