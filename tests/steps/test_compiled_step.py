"""A compiled step gives what `tf.function` gives, whatever it is called with."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.steps.compiled_step import CompiledStep
from tests.small import trainer

SCALAR = tf.TensorSpec([], tf.float64)


def rows(dtype: Any = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec([None, 2], dtype)


class Traced:
    """A step that counts its traces."""

    def __init__(self, *specs: Any) -> None:
        self.traces = 0
        self.step = CompiledStep(self._step, *specs)

    def _step(self, batch: Any, weight: Any) -> Any:
        self.traces += 1
        return {"batch": batch, "weight": 2 * weight}


def test_leaves_are_not_confused() -> None:
    """Two of one shape in a dict whose keys are not sorted, None, and lists in tuples."""
    spec = ({"b": rows(), "a": rows()}, [rows(), None])
    traced = Traced(spec, SCALAR)
    for factor in (1.0, 2.0, 2.0):
        parts = [factor * np.full((3, 2), i, np.float32) for i in range(3)]
        batch = ({"a": parts[0], "b": tf.constant(parts[1])}, [parts[2], None])
        found = traced.step(batch, np.float64(factor))
        inputs, (third, nothing) = found["batch"]
        for ours, part in zip((inputs["a"], inputs["b"], third), parts, strict=True):
            np.testing.assert_array_equal(ours, part)
        assert nothing is None
        assert float(found["weight"]) == 2 * factor
    assert traced.traces == 1


@pytest.mark.parametrize(
    "batch",
    [np.ones((3, 2)), np.ones((3, 4), np.float32), tf.ragged.constant([[1.0], [2.0, 3.0]])],
    ids=["another dtype", "another shape", "ragged"],
)
def test_what_does_not_fit_is_traced_again(batch: Any) -> None:
    traced = Traced(rows(), SCALAR)
    found = traced.step(batch, np.float64(1.0))["batch"]
    assert found.dtype == batch.dtype
    assert traced.traces == 2
    np.testing.assert_array_equal(
        found.values if isinstance(found, tf.RaggedTensor) else found,
        batch.values if isinstance(batch, tf.RaggedTensor) else batch,
    )


def test_none_at_another_leaf_is_traced_again() -> None:
    traced = Traced({"a": rows(), "b": None}, SCALAR)
    batch = {"a": None, "b": np.ones((3, 2), np.float32)}
    found = traced.step(batch, np.float64(1.0))["batch"]
    assert found["a"] is None
    np.testing.assert_array_equal(found["b"], batch["b"])
    assert traced.traces == 2


def test_inside_another_function() -> None:
    traced = Traced(rows(), SCALAR)
    outer = tf.function(lambda x: traced.step(x, np.float64(3.0)))
    assert float(outer(tf.ones((3, 2)))["weight"]) == 6.0


def test_functions_run_eagerly_on_demand() -> None:
    seen: list[bool] = []

    def step(batch: Any, weight: Any) -> Any:
        seen.append(tf.executing_eagerly())
        return weight

    compiled = CompiledStep(step, rows(), SCALAR)
    tf.config.run_functions_eagerly(True)
    try:
        compiled(np.ones((1, 2), np.float32), np.float64(1.0))
    finally:
        tf.config.run_functions_eagerly(False)
    compiled(np.ones((1, 2), np.float32), np.float64(1.0))
    assert seen == [False, True]


def test_without_specs_it_is_traced_as_it_is_called() -> None:
    traced = Traced()
    for shape in ((1, 2), (3, 2)):
        assert traced.step(np.ones(shape), np.float64(1.0))["batch"].shape == shape


class Counts(keras.layers.Layer):
    """Notes each of its traces: whether it is of training."""

    def __init__(self) -> None:
        super().__init__()
        self.traces: list[bool | None] = []

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.traces.append(training)
        return x


@pytest.mark.parametrize(("accumulate", "traces"), [(1, [False, True]), (2, [False, True, True])])
def test_each_function_of_a_fit_is_traced_once(accumulate: int, traces: list[bool]) -> None:
    """One of testing, for its variables; one that counts rows of parts; one of training."""
    counts = Counts()
    model = keras.Sequential([keras.Input((3,)), counts, keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    counts.traces.clear()
    x = np.ones((16, 3), np.float32)
    with trainer((), health__verify="off", trainer__accumulate=accumulate) as it:
        it.fit(model, (x, x[:, :1]))
    assert counts.traces == traces
