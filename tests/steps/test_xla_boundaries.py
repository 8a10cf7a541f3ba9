"""What stays between the programs of a step that XLA compiles in segments, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.data.local_batch import LocalBatch
from ktrainer.errors import ModelError
from ktrainer.steps import CompiledProgram, StepOptions
from ktrainer.steps.assertions import assert_in_graph, explain_assertions
from ktrainer.steps.powersgd import _orthonormal
from ktrainer.steps.xla_segments import compile_segments


def _communicated(tensor: tf.Tensor) -> tf.Tensor:
    found = tf.numpy_function(np.copy, [tensor], tensor.dtype)
    return tf.ensure_shape(found, tensor.shape)


def _compiled(step: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, set[str]]]:
    """The outputs of a step in segments, and the types of the ops of each segment."""
    function = tf.function(compile_segments(step), autograph=False)
    graph = function.get_concrete_function(*args).graph.as_graph_def()
    bodies = {each.signature.name: each.node_def for each in graph.library.function}
    names = {node.name: node.attr["f"].func.name for node in graph.node if "f" in node.attr}
    segments = {name: bodies[function] for name, function in names.items()}
    types = {name: {node.op for node in nodes} for name, nodes in segments.items()}
    return function(*args), types


def test_an_assertion_of_numbers_ends_the_step() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        check = assert_in_graph(tf.reduce_sum(x) > 0, "too low:", tf.cast(tf.size(x), tf.int64))
        with tf.control_dependencies(check):
            return _communicated(tf.identity(x) * 2)

    function = tf.function(compile_segments(step), autograph=False)
    np.testing.assert_array_equal(function(tf.ones([3])), 2 * np.ones(3))
    with pytest.raises(ModelError, match="too low: 3"), explain_assertions():
        function(-tf.ones([3]))


def test_an_array_of_tensors_is_made_where_it_is_read() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        rows = tf.TensorArray(tf.float32, size=3, element_shape=[2]).unstack(x)
        place = tf.cast(_communicated(tf.reduce_max(x)), tf.int32)
        return _communicated(rows.read(place) * 2)

    found, _ = _compiled(step, tf.constant([[0.0, 1], [2, 1], [1, 1]]))
    np.testing.assert_array_equal(found, [2, 2])


def test_a_loop_that_communicates() -> None:
    x = tf.constant([[0.0, 1], [2, 1], [1, 1]])
    found, _ = _compiled(lambda x: tf.map_fn(lambda row: _communicated(row) * 2, x * 3) + 1, x)
    np.testing.assert_array_equal(found, x * 6 + 1)


def test_a_branch_that_communicates_reads_an_array_of_tensors() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        rows = tf.TensorArray(tf.float32, size=3, element_shape=[2]).unstack(x * 2)
        low = tf.reduce_sum(x) < 0
        row = tf.cond(low, lambda: rows.read(0), lambda: _communicated(rows.read(1)))
        return _communicated(row * 2)

    found, _ = _compiled(step, tf.constant([[0.0, 1], [2, 1], [1, 1]]))
    np.testing.assert_array_equal(found, [8, 4])


def test_order_is_kept_through_a_constant() -> None:
    changed = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([changed.assign_add(x)]):
            constant = tf.constant(3.0)
        with tf.control_dependencies([constant]):
            again = changed.read_value() * 2
        return _communicated(again + constant)

    found, _ = _compiled(step, tf.constant(4.0))
    assert float(found) == 13


def test_variables_are_not_copied_by_xla() -> None:
    weights, momentum = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.zeros([4, 2]))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ weights) ** 2)
        gradient = _communicated(tape.gradient(loss, weights))
        momentum.assign(momentum * 0.5 + gradient)
        weights.assign_sub(momentum * 0.5)
        return loss

    loss, segments = _compiled(step, tf.eye(4))
    assert float(loss) == 8
    np.testing.assert_array_equal(weights, np.zeros((4, 2)))
    assert segments
    assert all("ReadVariableOp" not in types for types in segments.values()), segments


def test_the_frames_of_powersgd_are_not_xlas() -> None:
    """Its QR has other bits on other processors; all ranks must have the same."""
    columns = tf.constant(np.random.default_rng(0).normal(size=(8, 2)))
    frame, segments = _compiled(lambda x: _communicated(_orthonormal(x * 1)), columns)
    np.testing.assert_array_equal(frame, _orthonormal(columns))
    assert all("Qr" not in types for types in segments.values()), segments


def test_a_model_with_a_host_function_predicts() -> None:
    """As it trains; with several ranks, of which prediction needs none."""

    class OnHost(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return _communicated(x) * 2

    model = keras.Sequential([keras.Input((3,)), OnHost()])
    several: Any = object()
    program = CompiledProgram(model, StepOptions(xla=True), several)
    found = program.predict(LocalBatch(np.ones((4, 3), "float32"), 4, 8))
    np.testing.assert_array_equal(found, 2 * np.ones((4, 3)))
