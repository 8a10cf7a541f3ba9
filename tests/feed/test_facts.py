"""The facts by which ranks tell models and data apart."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from ktrainer import preflight
from tests.feed.worlds import feed, numbered


def _model(units: int = 4, rate: float = 0.1, loss: str = "mse", lr: float = 0.1) -> keras.Model:
    dense = keras.layers.Dense(units, kernel_regularizer=lambda w: 0.0 * keras.ops.sum(w))
    model = keras.Sequential([keras.Input((3,)), dense, keras.layers.Dropout(rate)])
    model.compile(keras.optimizers.Adam(lr), loss, metrics=["mae"])
    return model


def test_model_facts_are_the_same_for_the_same_model() -> None:
    facts = preflight.model_facts(_model())
    assert preflight.model_facts(_model()) == facts  # layers are now called dense_1, dropout_1
    assert facts["variable 0 (sequential/dense/kernel)"] == "float32[3, 4]"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"units": 5}, "variable 0 (sequential/dense/kernel)"),
        ({"rate": 0.2}, "layer 2"),
        ({"loss": "mae"}, "compile loss"),
        ({"lr": 0.2}, "compile optimizer"),
    ],
)
def test_model_facts_tell_models_apart(options: dict[str, Any], name: str) -> None:
    one, two = preflight.model_facts(_model()), preflight.model_facts(_model(**options))
    assert one[name] != two[name]


class _Private(keras.Model):
    """Not serialisable, and not built."""

    def __init__(self, secret: object) -> None:
        super().__init__()
        self.secret = secret

    def call(self, x: Any) -> Any:
        return x


def test_model_facts_of_what_cannot_be_serialised() -> None:
    model = _Private(object())
    model.compile(loss=lambda y, p: keras.ops.mean(p))
    assert preflight.model_facts(model)["class"] == "_Private"
    assert preflight.model_facts(_Private(object()))["class"] == "_Private"


def test_data_facts_are_prefixed() -> None:
    facts = preflight.data_facts(feed(numbered(8)), "validation")
    assert {"validation/x", "validation/length"} <= set(facts)
