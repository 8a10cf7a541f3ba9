"""What the tests plan: a script, and words that make a pipeline of it."""

from __future__ import annotations

SCRIPT = """
import sys
import keras
import numpy as np
from keras import layers
from ktrainer import Trainer

def build():
    stack = [layers.Dense(16, name=f"dense_{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((16,)), *stack], name="stack")
    model.compile("adam", "mse")
    return model

if __name__ == "__main__":
    trainer = Trainer.from_cli(argv=[word for word in sys.argv[1:] if word != "--own"])
    x = np.zeros((64, 16), "float32")
    try:
        trainer.fit(build, (x, x))
    except Exception:
        print("caught")
    print("trained")
"""
PIPELINE = ["backend=pipeline", "backend.partitions=2", "backend.microbatches=4"]
SEQUENTIAL = 'Sequential([keras.Input((16,)), *stack], name="stack")'
