"""What ranks run in these tests: trainings of the zoo and of two larger models, and questions.

Each function begins with a Trainer, before anything else starts TensorFlow.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from mpi4py import MPI

from ktrainer import Trainer
from ktrainer.cli.env_command import gather
from tests.contracts.running import (
    SEED,
    Outcome,
    assert_same,
    config,
    outcome_of,
    use_float64,
    with_keras,
    with_ktrainer,
)
from tests.contracts.zoo import ZOO
from tests.dist.harness import keras_state

ROWS, BATCH = 6 * 128, 128  # six updates


def parallel() -> dict[str, Any]:
    """The backend of all ranks of this group."""
    return {"name": "data_parallel" if MPI.COMM_WORLD.size > 1 else "local"}


def start() -> dict[str, Any]:
    """Start TensorFlow as a Trainer does; facts of the device and the software."""
    with Trainer(config(backend=parallel())):
        # One operation of each library: kernels may be compiled for the GPU at first use.
        x = tf.ones((2, 16, 16, 4))
        float(tf.reduce_sum(tf.matmul(x, x, transpose_b=True)))
        float(tf.reduce_sum(tf.nn.conv2d(x, tf.ones((3, 3, 4, 8)), 1, "SAME")))
    return facts()


def facts() -> dict[str, Any]:
    """Names and versions, as text."""
    here, build = gather(), tf.sysconfig.get_build_info()
    found: dict[str, Any] = {"gpus": here["devices"]["gpus"], "driver": _driver()}
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        found["compute capability"] = str(details.get("compute_capability"))
    found |= {name: str(build[name]) for name in ("cuda_version", "cudnn_version") if name in build}
    for name in ("python", "tensorflow", "keras", "mpi", "ktrainer"):
        found[name] = here[name]["version"]
    found["cores"] = here["devices"]["cores"]
    found["memory GiB"] = here["devices"]["memory_gib"]
    return found | {"processor": platform.processor() or platform.machine()}


def _driver() -> str:
    return _nvidia_smi("driver_version") or "none"


def used_share() -> float | None:
    """The part of the GPU's memory that all processes use; None if nvidia-smi does not say."""
    text = _nvidia_smi("memory.used,memory.total").split(",")
    return float(text[0]) / float(text[1]) if len(text) == 2 else None


def _nvidia_smi(field: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    done = subprocess.run(
        [*command, f"--id={chosen}"], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Whether float32 products may be computed in TF32, which TensorFlow does by default."""
    tf.config.experimental.enable_tensor_float_32_execution(on)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def zoo(names: Sequence[str], **sections: Any) -> dict[str, Outcome]:
    """Train models of the zoo in float64; `sections` are of the configuration."""
    outcomes = {}
    for name in names:
        keras_state.clear()
        use_float64()
        outcomes[name] = with_ktrainer(ZOO[name], **sections)
    return outcomes


def equals_fit(names: Sequence[str]) -> None:
    """Assert that deterministic runs repeat, and have the bits of Keras' `fit`."""
    for name in names:
        keras_state.clear()
        runs = [
            with_ktrainer(ZOO[name], seed=SEED, trainer={"deterministic": True}) for _ in range(2)
        ]
        assert_same(*runs)
        # Which is still deterministic; Keras does not use XLA then.
        assert_same(runs[0], with_keras(ZOO[name]))


def drawn(seed: int) -> Callable[..., Any]:
    """An initializer whose values do not depend on the device, and fit float32."""

    def values(shape: Sequence[int], dtype: Any = None) -> Any:
        random = np.random.default_rng(seed).normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
        return keras.ops.convert_to_tensor(random.astype(np.float32), dtype)

    return values


def dense(units: int, seed: int, **more: Any) -> layers.Layer:
    return layers.Dense(units, kernel_initializer=drawn(seed), **more)


def last(seed: int) -> layers.Layer:
    return dense(10, seed, dtype=keras.config.floatx())  # logits in full precision


def wide() -> keras.Model:
    """Sums of up to 784 products."""
    return keras.Sequential(
        [keras.Input((784,)), dense(512, 1, activation="tanh"), dense(512, 2), last(3)]
    )


def convolutional() -> keras.Model:
    """Sums of up to 288 products, and of 32,768 in the backward pass."""

    def conv(seed: int) -> layers.Layer:
        return layers.Conv2D(
            32, 3, padding="same", activation="tanh", kernel_initializer=drawn(seed)
        )

    return keras.Sequential(
        [
            layers.Reshape((16, 16, 3)),
            conv(1),
            conv(2),
            layers.AveragePooling2D(4),
            layers.Flatten(),
            last(3),
        ]
    )


MODELS = {"wide": (wide, 784), "convolutional": (convolutional, 768)}


def compiled(name: str) -> keras.Model:
    """One of `MODELS`, whose weights begin with the same numbers everywhere."""
    build, columns = MODELS[name]
    model = build()
    model.build((None, columns))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def beginning(name: str) -> list[np.ndarray]:
    """The weights of one of `MODELS` before training."""
    return [v.numpy() for v in compiled(name).trainable_variables]


def updates(
    name: str, floats: str = "float32", may_use_tf32: bool = False, **sections: Any
) -> Outcome:
    """Six updates of one of `MODELS`, of the same data.

    Args:
        floats: `"float64"`, or a value of trainer.precision.
        may_use_tf32: see `tf32`.
        sections: of the configuration.
    """
    keras_state.clear()
    if floats == "float64":
        use_float64()
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, MODELS[name][1])).astype(np.float32)
    data = x.astype(keras.config.floatx()), random.integers(0, 10, ROWS)
    settings = config(
        data={"batch_size": BATCH},
        trainer={"epochs": 1, "precision": None if floats == "float64" else floats},
        **sections,
    )
    with tf32(may_use_tf32), Trainer(settings) as trainer:
        history = trainer.fit(lambda: compiled(name), data)
        return outcome_of(trainer.model, history)
