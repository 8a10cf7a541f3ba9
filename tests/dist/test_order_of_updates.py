"""Updates in functions, branches and loops of a step are summed over ranks, each with its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dist.small import make_trainer

ROWS, BATCH = 24, 4


def _model(kind: str, rank: int) -> Any:
    """Two variables with an optimizer each, whose gradients come in another order on each rank."""
    import keras
    import tensorflow as tf

    class TwoUpdates(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.weights_of = [
                self.add_weight(shape=(3,), initializer="zeros", name=name) for name in "ab"
            ]
            self.optimizers = [keras.optimizers.SGD(1.0) for _ in range(2)]
            for optimizer, weight in zip(self.optimizers, self.weights_of, strict=True):
                optimizer.build([weight])

        def call(self, x: Any) -> Any:
            return x

        def update(self, which: int, x: Any) -> int:
            def late(gradient: Any) -> Any:
                time.sleep(0.03 * ((rank + which) % 2))
                return gradient

            gradient = 100.0**which * tf.reduce_mean(x) * tf.ones([3])
            gradient = tf.ensure_shape(tf.py_function(late, [gradient], tf.float32), [3])
            self.optimizers[which].apply([gradient], [self.weights_of[which]])
            return 0

        @tf.function
        def update_in_a_function(self, which: int, x: Any) -> int:
            if tf.shape(x)[0] >= 0:  # AutoGraph makes it a branch
                self.update(which, x)
            return 0

        @tf.function
        def update_in_a_loop(self, x: Any) -> None:
            for _ in tf.range(2):
                for which in range(2):
                    self.update(which, x / 2)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            if kind == "loop":
                self.update_in_a_loop(x)
            for which in range(2 if kind != "loop" else 0):
                if kind == "function":
                    self.update_in_a_function(which, x)
                elif kind == "branch" and which == 0:
                    tf.cond(tf.shape(x)[0] > 0, lambda: self.update(0, x), lambda: 0)
                else:
                    self.update(which, x)
            return {"loss": tf.reduce_sum(self.weights_of[0])}

    model = TwoUpdates()
    model.compile()
    model.build((None, 1))
    return model


def _train(kind: str) -> list[np.ndarray]:
    with make_trainer(data__shuffle=False, trainer__epochs=1) as trainer:
        model = _model(kind, trainer.world.rank)
        if kind == "function":  # traced before, when nothing was summed over ranks
            for which in range(2):
                model.update_in_a_function(which, np.zeros((BATCH, 1), "float32"))
        x = np.arange(ROWS, dtype="float32").reshape(ROWS, 1)
        trainer.fit(model, x, batch_size=BATCH)
        return [np.array(v.numpy()) for v in model.weights_of]


@pytest.mark.parametrize("kind", ["function", "branch", "loop"])
def test_each_update_gets_its_own_gradients(ranks: Callable[..., Any], kind: str) -> None:
    total = ROWS * (ROWS - 1) / 2 / BATCH  # of the means of all batches
    for first, second in ranks(2).run(_train, kind):
        np.testing.assert_array_equal(first, [-total] * 3)
        np.testing.assert_array_equal(second, [-100 * total] * 3)
