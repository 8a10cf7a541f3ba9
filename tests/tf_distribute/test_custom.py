"""Loops of the user's own: `trainer.scope`, `distribute`, `run` and `reduce`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tf_distribute.running import close, under
from tests.tf_distribute.test_features import trainer, vectors

ROWS, BATCH = 33, 16  # the last batch has one row: one replica has none


def trained(strategy: str) -> Any:
    """Sums of losses, means of rows, and weights; losses are divided by the global batch."""
    import keras
    import tensorflow as tf

    x, y = vectors(ROWS)
    with trainer(strategy) as it:
        with it.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / BATCH
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss, "rows": tf.cast(tf.shape(x)[0], tf.float32)}

        found = []
        for batch in it.distribute(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)):
            of_replicas = it.run(step, *batch)
            mean = it.reduce("mean", of_replicas)
            found.append([float(it.reduce("sum", of_replicas["loss"])), float(mean["rows"])])
        return found, [np.array(v.numpy()) for v in model.trainable_variables]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker_mirrored"])
def test_a_loop_with_batches_that_do_not_divide(ranks: Callable[..., Any], strategy: str) -> None:
    by_rank = under(ranks, strategy, trained, strategy)
    ((expected, weights),) = under(ranks, "local", trained, "local")
    assert [rows for _, rows in expected] == [16, 16, 1]
    for ours in by_rank:
        for (loss, rows), (reference, whole) in zip(ours[0], expected, strict=True):
            assert loss == pytest.approx(reference, rel=1e-5)
            assert rows == whole / 2
        close(ours[1], weights, atol=1e-6)


def rows_seen(policy: str, folder: str) -> list[list[int]]:
    """The numbers of the rows that this process gets, step by step."""
    import tensorflow as tf

    words = {"backend__auto_shard": policy}
    words |= {"data__batch": "per_worker"} if policy == "off" else {}
    with trainer("multi_worker_mirrored", **words) as it:
        files = tf.data.Dataset.list_files(f"{folder}/*.txt", shuffle=False)
        lines = tf.data.TextLineDataset(files).map(lambda s: tf.strings.to_number(s, tf.int64))
        parts = map(it.strategy.experimental_local_results, it.distribute(lines.batch(4)))
        return [part.numpy().tolist() for (part,) in parts]


@pytest.mark.exhaustive
def test_how_processes_share_the_data(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Two files, of rows 0 to 7 and 8 to 15; both processes together take 4 a step."""
    for file in range(2):
        (tmp_path / f"{file}.txt").write_text("\n".join(str(8 * file + i) for i in range(8)))
    found = {
        policy: under(ranks, "multi_worker_mirrored", rows_seen, policy, str(tmp_path))
        for policy in ("data", "file", "off")
    }
    pairs = np.arange(16).reshape(8, 2).tolist()
    assert found == {
        "data": [pairs[0::2], pairs[1::2]],
        "file": [pairs[:4], pairs[4:]],
        "off": [pairs, pairs],
    }
