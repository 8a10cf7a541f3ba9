"""A rank that has stopped is named by those that wait for it inside Horovod, and all end."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.small import more

SCRIPT = """
import os, signal, time
import keras, numpy as np, tensorflow as tf
from ktrainer import Trainer

calls = 0

def stop_in_the_third_step(x):
    global calls
    calls += 1
    if calls == 3 and trainer.world.rank == trainer.world.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)  # until the main thread, which takes the signal, has a core
    return x

class Stops(keras.layers.Layer):
    def call(self, x):
        y = tf.py_function(stop_in_the_third_step, [tf.stop_gradient(x)], x.dtype)
        return x + tf.ensure_shape(tf.stop_gradient(y), x.shape)

class Deadline(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        trainer.world.deadline = 5.0  # the first batch compiled

def build():
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((6,)), dense(8), Stops(), dense(3)])
    model.compile("sgd", "mse")
    return model

trainer = Trainer.from_cli(callbacks=[Deadline()])
trainer.fit(build, (np.zeros((64, 6), "float32"), np.zeros((64, 3), "float32")))
"""
STAGES = "backend.stages={0: dense, 1: 'stops|dense_1'}"
WORDS = ("backend.engine=horovod", "data.batch_size=16", "logging.progress=none")


@pytest.mark.exhaustive
@pytest.mark.horovod
@pytest.mark.parametrize(
    ("size", "words"),
    [
        (2, ("backend=data_parallel",)),
        more(4, ("backend=pipeline", "backend.partitions=2", "backend.microbatches=1", STAGES)),
    ],
    ids=["data_parallel", "pipeline"],
)
def test_a_rank_that_stops_is_named(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    script: Callable[[str], Path],
    size: int,
    words: tuple[str, ...],
) -> None:
    done = launch("-n", size, script(SCRIPT), *words, *WORDS, warm=True)
    assert done.returncode not in (0, None), done.stdout
    assert re.search(r"DeadlineExceeded: rank \d waited 5 s at step 3 in", done.stderr), done.stderr
    # In the pipeline some wait in Horovod, and one for its other stage: all of them answer.
    assert "'sums over ranks through Horovod'" in done.stderr, done.stderr
    assert f"No answer from rank {size - 1}:" in done.stderr
    assert re.search(rf"rank {size - 1} \(process \d+\) is stopped \(state T\)", done.stderr)
