"""`predict` of a model with ragged outputs returns what `Model.predict` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ktrainer import Trainer
from tests.tf_distribute.running import make_devices, under

LENGTHS = [1, 1, 1, 1, 3, 2, 1, 2, 3]  # of one batch alike, then uneven ones


class Ragged(keras.Model):
    """The row lengths of its input, as rows of that length and as they are."""

    def call(self, x: Any) -> Any:
        rows = tf.repeat(x[:, 0], x[:, 0])
        return {"rows": tf.RaggedTensor.from_row_lengths(rows, x[:, 0]), "lengths": x}


def predicted(backend: str, **settings: Any) -> tuple[str, Any, Any]:
    x = np.array(LENGTHS, "int64")[:, None]
    if backend == "keras":
        found = Ragged().predict(x, batch_size=4, verbose=0)
    else:
        given = {"backend": {"name": backend, **settings}, "logging": {"progress": "none"}}
        with Trainer(given) as trainer:
            found = trainer.predict(Ragged(), x, batch_size=4)
    return type(found["rows"]).__name__, found["rows"].to_list(), found["lengths"].tolist()


def test_ragged_outputs_are_those_of_keras(ranks: Callable[..., Any]) -> None:
    expected = predicted("keras")
    assert predicted("local") == expected
    assert ranks(2).run(predicted, "data_parallel") == [expected] * 2
    assert under(ranks, "mirrored", predicted_by_replicas) == [expected]


def predicted_by_replicas() -> tuple[str, Any, Any]:
    make_devices()
    return predicted("tf_distribute", strategy="mirrored", devices=2)
