"""Prints, for each rank, what training a pipeline takes of resident memory; see test_memory.py.

ktrainer launch -n 2 memory_script.py WIDTH
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

from ktrainer import Trainer
from ktrainer.steps.placement import placement_of

LAYERS, ROWS, MICROBATCHES = 24, 64, 8
CONFIG = {
    "backend": {"name": "pipeline", "partitions": 2, "microbatches": MICROBATCHES},
    "trainer": {"max_steps": 3},
    "data": {"batch_size": ROWS},
    "logging": {"progress": "none", "csv": False},
    "health": {"audit_every": None},
    "checkpoint": {"resume": "never"},
}


def build(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.Adam(1e-5), "mse")
    return model


class Peak:
    """The most resident memory inside the block, in bytes, above that at its beginning."""

    def __enter__(self) -> Peak:
        self._process, self._stop = psutil.Process(), threading.Event()
        self.before = self.most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, self._process.memory_info().rss)
            time.sleep(0.002)

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.grown = self.most - self.before


def bytes_of(variables: Any) -> int:
    return sum(4 * int(np.prod(v.shape)) for v in variables)


def main() -> None:
    trainer = Trainer(CONFIG)
    grown = {}
    for width in (16, int(sys.argv[1])):  # the narrow one: what the code itself takes
        x = np.random.default_rng(0).random((3 * ROWS, width)).astype("float32")
        with Peak() as peak:
            trainer.fit(lambda width=width: build(width), (x, x))
        grown[width] = peak.grown
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
        "code": grown[16],
        "grown": grown[width],
        "share": 2 * bytes_of(weights) + bytes_of(slots) + activations,
        "model": bytes_of(model.trainable_variables),
    }
    Path(f"memory-{trainer.world.rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
