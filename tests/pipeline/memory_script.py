"""Writes, for each rank, what training a pipeline takes of resident memory; see test_memory.py.

ktrainer run -n 4 memory_script.py LAYERS WIDTH
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

from ktrainer import Trainer
from ktrainer.steps.variable_placement import placement_of

M_MMAP_THRESHOLD = -3  # of mallopt(3)
ROWS, MICROBATCHES = 32, 2  # as few as two stages need: each pass takes long
CONFIG = {
    "backend": {"name": "pipeline", "partitions": 2, "microbatches": MICROBATCHES},
    "trainer": {"max_steps": 2},
    "data": {"batch_size": ROWS},
    "logging": {"progress": "none", "csv": False},
    "health": {"audit_every": None},
    "checkpoint": {"resume": "never"},
}


def build(layers: int, width: int) -> keras.Model:
    dense = [keras.layers.Dense(width, activation="relu") for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *dense])
    model.compile(keras.optimizers.Adam(1e-5), "mse")
    return model


def bytes_of(variables: Any) -> int:
    return sum(4 * int(np.prod(v.shape)) for v in variables)


def data_of(width: int) -> np.ndarray:
    return np.random.default_rng(0).random((2 * ROWS, width)).astype("float32")


def main() -> None:
    # The allocator raises this threshold as it likes, and then keeps what was freed.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17) == 1
    layers, width = map(int, sys.argv[1:])
    trainer = Trainer(CONFIG)
    narrow = data_of(16)  # loads and compiles what any model needs
    for _ in range(2):  # the second compiles while the first is there, as the next one will
        trainer.fit(lambda: build(layers, 16), (narrow, narrow))
    x = data_of(width)
    before = psutil.Process().memory_info().rss
    trainer.fit(lambda: build(layers, width), (x, x))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kept by the kernel: exact
    model = trainer.model
    placement = placement_of(model)
    assert model is not None
    assert placement is not None
    weights = [v for v in model.trainable_variables if placement.holds(v)]
    slots = [v for v in model.optimizer.variables if placement.holds(v)]
    # 1F1B keeps partitions - stage microbatches: each layer's output, and what came in.
    flying = placement.partitions - placement.partition
    activations = flying * (len(weights) // 2 + 1) * ROWS // MICROBATCHES * width * 4
    facts = {
        "grown": most - before,
        "share": 2 * bytes_of(weights) + bytes_of(slots) + activations,
        "model": bytes_of(model.trainable_variables),
    }
    Path(f"memory-{trainer.world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
