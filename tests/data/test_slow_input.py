"""The wait for data is shown, and a slow stage of the input is named."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.data import Examples
from ktrainer.data.stage_times import StageTimes

BATCH = np.ones((4, 3)), np.ones((4, 1))
SECONDS, BATCHES = 0.15, 6


class Slow(keras.utils.PyDataset):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        time.sleep(SECONDS)
        return BATCH


def slow_batches() -> Iterator[Any]:
    for _ in range(BATCHES):
        time.sleep(SECONDS)
        yield BATCH


def slow_example(item: Any) -> Any:
    time.sleep(SECONDS / 4)
    return np.ones(3), np.ones(1)


class Rows:
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> int:
        return index


def slow_map(number: tf.Tensor) -> Any:
    def wait(value: Any) -> Any:
        time.sleep(SECONDS)
        return value

    done = tf.numpy_function(wait, [number], tf.int64)
    with tf.control_dependencies([done]):
        return tf.ones([4, 3]), tf.ones([4, 1])


def fast_map(x: tf.Tensor, y: tf.Tensor) -> Any:
    return x + 1, y


SLOW = {
    "PyDataset": (lambda: Slow(), r"Slow\.__getitem__, [1-9]\d\d ms a batch"),
    "generator": (lambda: slow_batches, r"slow_batches, [1-9]\d\d ms a batch"),
    "examples": (
        lambda: Examples(Rows(), slow_example),
        r"Rows\[index\] and slow_example, [1-9]\d\d ms",
    ),
    "tf.data": (
        lambda: tf.data.Dataset.range(BATCHES).map(slow_map).map(fast_map),
        r"tf.data's Map of slow_map, [1-9]\d\d ms a batch",
    ),
}


@pytest.mark.quick("tf.data")
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_stage_is_named_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, says = SLOW[name]
    said = _fit(make(), capsys)
    hints = [line for line in said.splitlines() if line.startswith("input is the bottleneck")]
    assert len(hints) == 1
    assert re.search(says, hints[0]), hints[0]
    lines = [line for line in said.splitlines() if "data wait" in line and "ms/step" in line]
    waits = [float(line.split("data wait ")[1].split(" ")[0]) for line in lines]
    assert max(waits) > 1000 * SECONDS / 2


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bottleneck" not in _fit(Slow(), capsys, "logging.slow=null")
    assert "bottleneck" not in _fit(BATCH, capsys)


def _fit(data: Any, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    settings = ["logging.progress=plain", "logging.every=2ba", "data.batch_size=4", *words]
    with Trainer(overrides=settings) as trainer:
        trainer.fit(model, data, epochs=2)
    return capsys.readouterr().out


def test_measuring_costs_less_than_a_hundredth_of_a_step_of_10_ms() -> None:
    times, begin = StageTimes(), time.process_time()
    for _ in times.items(iter(range(2000)), "reading"):
        with times.timed("slicing"):
            pass
    assert (time.process_time() - begin) / 2000 < 1e-4
