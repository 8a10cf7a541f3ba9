"""Which GPU ranks take, how its memory grows, and that batches are there ahead of the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.backends.pipeline.runtime.message_buffers import make_buffers, mpi_is_cuda_aware
from tests.contracts.running import config
from tests.dist.harness import Ranks
from tests.gpu.device import Device
from tests.gpu.training import parallel, used_share
from tests.processes import script

pytestmark = pytest.mark.gpu

MUCH = 0.5  # of the GPU's memory: without growth each process takes nearly all of it
WIDE = 1 << 12  # columns: arrays of few bytes are not made ahead

TOO_LATE = """
import tensorflow as tf
tf.zeros(1) + 1
from ktrainer import Trainer
from ktrainer.errors import SetupError
try:
    with Trainer(overrides=["logging.progress=none"]):
        print("made")
except SetupError as error:
    print(error)
"""


def taken() -> dict[str, Any]:
    """What a Trainer has taken, and where the variables of a model are."""
    with Trainer(config(backend=parallel())) as trainer:
        variable = keras.Variable(np.zeros(3, np.float32))
        physical = tf.config.list_physical_devices("GPU")
        return {
            "gpus": [gpu.name for gpu in tf.config.list_logical_devices("GPU")],
            "grow": [tf.config.experimental.get_memory_growth(gpu) for gpu in physical],
            "input_device": trainer.backend.input_device,
            "variable": variable.value.device,
            "plan": str(trainer.plan),
            "allocated": sum(
                tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"]
                for i in range(len(physical))
            ),
            "used": used_share(),
            "buffers": type(make_buffers()).__name__,
            "cuda_aware": mpi_is_cuda_aware(),
        }


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_take_the_gpu_and_grow_its_memory(
    on_device: Callable[..., Ranks], device: Device, seen: Callable[..., None], size: int
) -> None:
    ranks = on_device(size).run(taken)
    one = ranks[0]
    seen(
        allocated_mib=max(rank["allocated"] for rank in ranks) / 2**20,
        used_share=one["used"],
        cuda_aware_mpi=one["cuda_aware"],
        buffers=one["buffers"],
    )
    for rank in ranks:
        assert rank["grow"] == [True] * len(rank["gpus"])
        assert len(rank["gpus"]) == (1 if device.is_gpu else 0)
        assert f"device:{device.kind}:0" in rank["variable"]
        assert rank["input_device"] == (rank["gpus"][0] if device.is_gpu else None)
        assert f"on {device.kind.lower()}" in rank["plan"]
        assert ("share 1 GPU(s)" in rank["plan"]) == (device.is_gpu and size == 2)
        assert rank["buffers"] == "HostBuffers" or (device.is_gpu and rank["cuda_aware"])
        assert rank["used"] is None or rank["used"] < MUCH


def test_a_trainer_after_tensorflow_says_what_to_do(device: Device, tmp_path: Path) -> None:
    (tmp_path / "too_late.py").write_text(TOO_LATE)
    done = script(tmp_path / "too_late.py", seconds=240, **device.environment)
    assert done.returncode == 0, done.stderr
    assert ("Make the Trainer first" if device.is_gpu else "made") in done.stdout


def batches_of_steps(kind: str, strategy: str = "") -> list[str]:
    """The devices of the batches that steps are given, and of what they compute."""
    places: list[str] = []

    class Watched(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            if tf.executing_eagerly():  # it is also traced, to make its variables
                places.extend([data[0].device, tf.identity(data[0]).device])
            return super().train_step(data)

    model = Watched([keras.Input((WIDE,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((40, WIDE), np.float32)
    named = {"name": "tf_distribute", "strategy": strategy} if strategy else parallel()
    with Trainer(config(backend=named)) as trainer:
        trainer.fit(model, DATA[kind](x, x[:, :1]))
    return places


def dataset(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def generator(x: np.ndarray, y: np.ndarray) -> Callable[[], Any]:
    return lambda: iter([(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:12], y[8:12])])


DATA: dict[str, Callable[..., Any]] = {"dataset": dataset, "generator": generator}


@pytest.mark.parametrize("kind", DATA)
def test_batches_are_on_the_device_ahead_of_the_step(
    on_device: Callable[..., Ranks], device: Device, kind: str
) -> None:
    (places,) = on_device().run(batches_of_steps, kind)
    assert len(places) >= 6
    assert all(f"{device.kind}:0" in place for place in places), places


@pytest.mark.parametrize(("size", "strategy"), [(2, ""), (1, "one_device"), (1, "mirrored")])
def test_steps_of_other_backends_are_on_the_device(
    on_device: Callable[..., Ranks], device: Device, size: int, strategy: str
) -> None:
    for places in on_device(size).run(batches_of_steps, "dataset", strategy):
        assert len(places) >= 6
        assert all(f"{device.kind}:0" in place for place in places), places
