"""Recurrent layers that keep a state for each row of a batch are refused where it is cut."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ktrainer.errors import ModelError
from tests.tf_distribute.running import under
from tests.tf_distribute.test_features import trainer

CALLS = ("fit", "evaluate", "predict")


def said(strategy: str) -> list[str]:
    """The errors of each call; "" for none."""
    import keras

    messages = []
    with trainer(strategy, data__batch_size=2, health__verify="off") as it:
        layers = [keras.layers.Bidirectional(keras.layers.LSTM(3, stateful=True, name="memory"))]
        model = keras.Sequential([keras.Input(batch_shape=(2, 4, 3)), *layers])
        model.compile("sgd", "mse")
        x, y = np.ones((4, 4, 3), "float32"), np.ones((4, 6), "float32")
        for call in CALLS:
            try:
                getattr(it, call)(model, x, *([] if call == "predict" else [y]))
                messages.append("")
            except ModelError as error:
                messages.append(str(error))
    return messages


@pytest.mark.quick("data_parallel")
@pytest.mark.parametrize("strategy", ["data_parallel", "mirrored", "local"])
def test_they_are_refused_where_batches_are_cut(
    ranks: Callable[..., object], strategy: str
) -> None:
    for messages in under(ranks, strategy, said, strategy):
        if strategy == "local":
            assert messages == [""] * len(CALLS)
        for message in messages if strategy != "local" else []:
            assert "memory' has stateful=True" in message
            assert "cut here for 2 ranks or replicas" in message
