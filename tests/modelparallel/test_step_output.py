"""`StepOutput` and the split of arguments, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.errors import DataError, ModelError
from ktrainer.modelparallel.split_arguments import split_arguments
from ktrainer.modelparallel.step_output import StepOutput

PARTS = np.random.default_rng(0).normal(size=(3, 4, 2))


def test_methods() -> None:
    """Each is NumPy's function of the microbatches' values."""
    output = StepOutput([tf.constant(part) for part in PARTS])
    want = {
        "reduce_mean": PARTS.mean(0),
        "reduce_sum": PARTS.sum(0),
        "concat": PARTS.reshape(12, 2),
        "merge": PARTS.reshape(12, 2),
        "stack": PARTS,
        "accumulate": PARTS.mean(0),
    }
    for name, value in want.items():
        np.testing.assert_allclose(getattr(output, name)(), value, rtol=0, atol=1e-15)
    assert len(output.outputs) == 3
    variable = tf.Variable(np.zeros((4, 2)))
    assert output.accumulate(method="accumulate_n", var=variable) is variable
    np.testing.assert_allclose(variable.numpy(), PARTS.mean(0), rtol=0, atol=1e-15)


def test_slices_of_an_embedding_are_those_of_the_whole_batch() -> None:
    """Adam squares each by itself, so that a sum of them has other second moments."""
    tokens, targets = tf.constant([[0, 1], [1, 1], [2, 0], [1, 2]]), tf.constant(PARTS[0])

    def gradient(layer: Any, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.reduce_sum(layer(tf.gather(tokens, rows)), 1)
            loss = tf.reduce_mean(tf.square(outputs - tf.gather(targets, rows)))
        return tape.gradient(loss, layer.trainable_variables[0])

    def updated(find: Callable[[Any], Any]) -> list[Any]:
        made = keras.initializers.Constant(0.5)
        layer = keras.layers.Embedding(3, 2, embeddings_initializer=made, dtype="float64")
        adam = keras.optimizers.Adam(0.1)
        for _ in range(2):
            adam.apply([find(layer)], layer.trainable_variables)
        return [*layer.get_weights(), *(v.numpy() for v in adam.variables)]

    def in_parts(layer: Any) -> Any:
        return StepOutput([gradient(layer, rows) for rows in ([0, 1], [2, 3])]).accumulate()

    truth = updated(lambda layer: gradient(layer, [0, 1, 2, 3]))
    for mine, value in zip(updated(in_parts), truth, strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-12)


def test_slices() -> None:
    """Sums, means and what they are assigned to, as of dense values."""
    slices = [tf.IndexedSlices(tf.constant(part[:2]), [1, 1], [4, 2]) for part in PARTS]
    dense = [tf.convert_to_tensor(each) for each in slices]
    variable = tf.Variable(np.zeros((4, 2)))
    for values in (slices, [dense[0], *slices[1:]]):
        output, want = StepOutput(values), StepOutput(dense)
        np.testing.assert_allclose(tf.convert_to_tensor(output.reduce_sum()), want.reduce_sum())
        np.testing.assert_allclose(tf.convert_to_tensor(output.reduce_mean()), want.reduce_mean())
        output.accumulate(var=variable)
        np.testing.assert_allclose(variable, want.reduce_mean())


def test_what_has_no_value() -> None:
    assert StepOutput([None, None]).accumulate() is None
    with pytest.raises(ModelError, match="returned None"):
        StepOutput([None, tf.ones([])]).accumulate()
    with pytest.raises(ModelError, match="batch axis"):
        StepOutput([tf.ones([2]), tf.ones([2])], None).merge()
    with pytest.raises(ModelError, match="one of add_n"):
        StepOutput([tf.constant(1.0)]).accumulate(method="mean")


class Own:
    """Cuts itself."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Own:
        return Own(np.split(self.rows, num_mb, axis)[mb])


def test_split() -> None:
    """Nested tensors, arrays and objects of the script's own; other axes; what stays whole."""

    def body(x: Any, mask: Any, table: Any, own: Any, scale: float = 1.0) -> None:
        pass

    rows = np.arange(12).reshape(6, 2)
    made = split_arguments(
        body,
        ({"a": tf.constant(rows), "b": [rows]}, tf.constant(rows.T), tf.constant(rows)),
        {"own": Own(rows), "scale": 2.0},
        3,
        ["table"],
        {"mask": 1},
    )
    for i, (args, kwargs) in enumerate(made):
        x, mask, table, own, scale = args
        part = rows[2 * i : 2 * i + 2]
        assert kwargs == {}
        np.testing.assert_array_equal(x["a"], part)
        np.testing.assert_array_equal(x["b"][0], part)
        np.testing.assert_array_equal(mask, part.T)
        np.testing.assert_array_equal(table, rows)
        np.testing.assert_array_equal(own.rows, part)
        assert scale == 2.0


def test_split_refuses() -> None:
    def body(x: Any) -> None:
        pass

    with pytest.raises(DataError, match="nearest legal sizes are 3 and 6"):
        split_arguments(body, (np.zeros((5, 1)),), {}, 3)
    with pytest.raises(DataError, match="no axis 0"):
        split_arguments(body, (tf.constant(1.0),), {}, 3)
