"""Backends that train on a tf.data service: the numbers of the same run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from tests.data.services import service
from tests.processes import warm_python
from tests.tf_distribute.running import ONE_PROCESS, make_devices


def fitted(folder: str, words: list[str]) -> dict[str, list[float]]:
    """The history of a run over shuffled data."""
    if "backend=tf_distribute" in words:
        make_devices()
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    x = np.arange(240, dtype=np.float32).reshape(40, 6) / 240
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(40, seed=2).batch(8)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    settings = [f"run.dir={folder}", "logging.progress=none", "trainer.epochs=2", *words]
    with Trainer(overrides=settings) as trainer:
        history: dict[str, list[float]] = trainer.fit(model, data).history
        return history


@pytest.mark.exhaustive
def test_stages_and_replicas_train_on_the_batches_of_the_pipeline(
    ranks: Any, tmp_path: Path
) -> None:
    pipeline = ["backend=pipeline", "backend.partitions=2"]
    mirrored = ["backend=tf_distribute", "backend.strategy=mirrored", "backend.devices=2"]
    with service(tmp_path, "-n", "1", "--threads", "1", python=warm_python()) as started:
        served = f"data.service.config={started.path}"
        for group, words in ((ranks(2), pipeline), (ranks(1, ONE_PROCESS), mirrored)):
            name = words[0].partition("=")[2]
            without = group.run(fitted, str(tmp_path / name), words, deadline=120)
            found = group.run(fitted, str(tmp_path / f"{name}-2"), [*words, served], deadline=120)
            assert found == without
