"""Logs that `compute_metrics` nests: those of all replicas, and those of one process."""

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
