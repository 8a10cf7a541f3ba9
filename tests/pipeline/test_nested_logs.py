"""Logs that `compute_metrics` nests: those of all replicas, and those of one process; and a metric
that a layer updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.contracts.running import use_float64, with_ktrainer
from tests.contracts.zoo import Case, features_and_targets


def build() -> Any:
    import keras

    class Nesting(keras.Sequential):
        def compute_metrics(self, *args: Any, **named: Any) -> Any:
            logs = super().compute_metrics(*args, **named)
            return {"loss": logs.pop("loss"), "others": {"deep": logs}}

    model = Nesting([keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", "cosine_similarity"])
    return model


def history(backend: dict[str, Any], **more: Any) -> Any:
    use_float64()
    return with_ktrainer(Case(build, features_and_targets), backend=backend, **more).history


@pytest.mark.quick
@pytest.mark.parametrize(
    ("partitions", "more"), [(2, {}), (1, {"health": {"nan": "skip"}})], ids=["plain", "guarded"]
)
def test_nested_logs(ranks: Callable[..., Any], partitions: int, more: dict[str, Any]) -> None:
    """Two stages of a model, and two replicas of the whole."""
    backend = {"name": "pipeline", "partitions": partitions, "microbatches": 2}
    truth = history({"name": "local"})
    assert {"mae", "val_mae", "val_cosine_similarity"} < truth.keys()
    for ours in ranks(2).run(history, backend, **more):
        assert list(ours) == list(truth)
        for key, values in truth.items():
            np.testing.assert_allclose(ours[key], values, rtol=1e-9, err_msg=key)


def _counted_by_a_layer(on_stage: int) -> Any:
    """The history of a model with a layer that counts, on this stage of two; or an error."""
    import keras

    import ktrainer

    class Counts(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seen = keras.metrics.Sum(name="seen")

        def call(self, inputs: Any) -> Any:
            self.seen.update_state(keras.ops.ones_like(inputs[:, 0]))
            return inputs

    def made() -> Any:
        inputs = keras.Input((8,))
        with ktrainer.partition(0):
            hidden = keras.layers.Dense(4)(inputs)
            hidden = hidden if on_stage else Counts()(hidden)
        with ktrainer.partition(1):
            hidden = Counts()(hidden) if on_stage else hidden
            outputs = keras.layers.Dense(2)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    backend = {"name": "pipeline", "partitions": 2, "microbatches": 2}
    try:
        return with_ktrainer(Case(made, features_and_targets), backend=backend).history
    except ktrainer.ModelError as error:
        return str(error)


def test_a_metric_of_a_layer(ranks: Callable[..., Any]) -> None:
    """On the last stage it counts as in one process; elsewhere it would be logged as 0."""
    for found in ranks(2).run(_counted_by_a_layer, 1):
        assert found["seen"] == [33.0, 33.0]
    for found in ranks(2).run(_counted_by_a_layer, 0):
        assert "'seen' on stage 0 of a pipeline" in found
