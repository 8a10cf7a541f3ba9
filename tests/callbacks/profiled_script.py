"""Trains with `trainer.profile`; the clock of rank 1, or AHEAD, is 1000 s ahead, and FAST times as
fast. Rank 1 is killed after step KILL."""

import os
import signal
import sys
import time

if os.environ.get("OMPI_COMM_WORLD_RANK") == os.environ.get("AHEAD", "1"):
    clock, fast = time.perf_counter, float(os.environ.get("FAST", "1"))
    time.perf_counter = lambda: clock() * fast + 1000.0

import keras
import numpy as np

from ktrainer import Callback, Trainer


class Kill(Callback):
    def on_step_end(self, step, logs=None):
        if str(step) == os.environ.get("KILL") and self.world.stable_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(32, "relu") for _ in range(4)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).random((320, 8), dtype=np.float32)
with Trainer.from_cli(argv=[*sys.argv[1:], "logging.progress=none"], callbacks=[Kill()]) as trainer:
    trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=2)
