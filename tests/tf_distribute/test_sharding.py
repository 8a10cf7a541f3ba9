"""How processes share a tf.data pipeline under `fit`: `backend.auto_shard`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.cases import BATCH, Case, Outcome, _mlp, difference, train, vectors
from tests.tf_distribute.running import under

ROWS = 4 * BATCH


def pipeline(x: np.ndarray, y: np.ndarray, batch: int = BATCH) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def from_files(folder: str) -> Any:
    """A text file for each process, of the rows' numbers."""
    import tensorflow as tf

    x, y = (tf.constant(part) for part in vectors())
    files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
    numbers = tf.data.TextLineDataset(files).map(lambda s: tf.strings.to_number(s, tf.int64))
    return numbers.map(lambda i: (tf.gather(x, i), tf.gather(y, i))).batch(BATCH)


def shared_by(policy: str, folder: str) -> Outcome:
    from ktrainer.distributed import current_world

    words = {"backend": "tf_distribute", "backend__strategy": "multi_worker_mirrored"}
    words |= {"backend__auto_shard": policy, "trainer__epochs": 2}

    def by_hand() -> Any:
        x, y = vectors()
        mine = slice(current_world().rank * BATCH, ROWS)
        return pipeline(x[mine], y[mine]).shard(2, 0)

    if policy == "off":
        words["data__batch"] = "per_worker"
    # TensorFlow is in use once a Dataset is made: the Trainer comes first.
    data = by_hand if policy == "off" else lambda: from_files(folder)
    return train(Case(lambda: _mlp("adamw"), data), **words)


def in_one_process(steps: list[np.ndarray]) -> Outcome:
    """A training on the rows of each step."""
    x, y = vectors()
    rows, size = np.concatenate(steps), len(steps[0])
    data = pipeline(x[rows], y[rows], size)
    return train(Case(lambda: _mlp("adamw"), data), backend="local", trainer__epochs=2)


@pytest.mark.exhaustive
def test_file_and_off(ranks: Callable[..., Any], tmp_path: Path) -> None:
    numbers = np.arange(ROWS)
    halves = np.split(numbers, 2)
    for i, half in enumerate(halves):
        (tmp_path / f"{i}.txt").write_text("\n".join(map(str, half)))
    # Each batch of a file is two steps, beside the other file's.
    parts = [half.reshape(-1, BATCH // 2) for half in halves]
    expected = {"file": in_one_process(list(np.concatenate(parts, 1)))}
    # A step is a batch of each process.
    expected["off"] = in_one_process(list(numbers.reshape(-1, 2 * BATCH)))
    for policy, reference in expected.items():
        name = "multi_worker_mirrored"
        first, second = under(ranks, name, shared_by, policy, str(tmp_path))
        assert first.checksum == second.checksum
        assert difference(reference, first) <= 1e-10, policy
