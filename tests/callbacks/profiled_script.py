"""Trains with `trainer.profile`; the clock of rank 1 is 1000 s ahead."""

import os
import sys
import time

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + 1000.0

import keras
import numpy as np

from ktrainer import Trainer

keras.utils.set_random_seed(0)
layers = [keras.layers.Dense(32, "relu") for _ in range(4)]
model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.random.default_rng(0).random((320, 8), dtype=np.float32)
with Trainer.from_cli(argv=[*sys.argv[1:], "logging.progress=none"]) as trainer:
    trainer.fit(model, x, x.sum(axis=1), batch_size=16, epochs=2)
