"""A `tf.function` that a step calls is traced with the step, and keeps what it was made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer.distributed.collectives import GradientCollectives
from ktrainer.errors import ModelError
from ktrainer.steps.keras_patches import keras_patches
from ktrainer.steps.step_context import StepContext
from tests import small

SCALAR = tf.TensorSpec([], tf.float32)


def context(**settings: Any) -> StepContext:
    return StepContext(tf.ones([], tf.float64), **settings)


def in_step(step: Callable[[], Any], eagerly: bool = False, **settings: Any) -> Any:
    """What a step returns."""

    def traced() -> Any:
        with keras_patches(context(**settings)):
            return step()

    return traced() if eagerly else tf.function(traced, autograph=False)()


def is_compiled(step: Callable[[], Any], **settings: Any) -> bool:
    """Whether a step calls a function that XLA compiles."""

    def traced() -> Any:
        with keras_patches(context(**settings)):
            return step()

    graph = tf.function(traced, autograph=False).get_concrete_function().graph
    calls = [op for op in graph.get_operations() if op.type.endswith("PartitionedCall")]
    return any(op.get_attr("_XlaMustCompile") for op in calls)


@pytest.mark.parametrize("eagerly", [True, False])
def test_vectorized_map_and_jacobian(eagerly: bool) -> None:
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.square(x)
        squares = tf.vectorized_map(tf.square, x)
        return squares, keras.ops.vectorized_map(tf.square, x), tape.jacobian(y, x)

    squares, again, jacobian = in_step(step, eagerly)
    np.testing.assert_array_equal(squares, tf.square(x))
    np.testing.assert_array_equal(again, tf.square(x))
    assert jacobian.shape == (2, 2, 2, 2)
    np.testing.assert_array_equal(tf.einsum("ijij->ij", jacobian), 2 * x)


class Jacobians(keras.Model):
    """Its loss has a penalty of each example's own, by `tf.vectorized_map`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return (
            self.dense(x)
            + 0.0 * tf.vectorized_map(lambda row: tf.reduce_sum(row**2, -1), x)[:, None]
        )


def test_a_model_with_one_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    model = Jacobians()
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    settings = {"trainer__accumulate": 2, "trainer__epochs": 1, "logging__progress": "plain"}
    with small.trainer(**settings, health__verify="auto") as trainer:
        trainer.fit(model, x, y, batch_size=2)
    assert "did not check" not in capsys.readouterr().err


@pytest.mark.parametrize("eagerly", [True, False])
def test_a_restored_function_is_called(tmp_path: Any, eagerly: bool) -> None:
    module = tf.Module()
    module.double = tf.function(lambda x: 2 * x, input_signature=[SCALAR])
    tf.saved_model.save(module, str(tmp_path))
    restored = tf.saved_model.load(str(tmp_path))
    assert float(in_step(lambda: restored.double(tf.constant(2.0)), eagerly)) == 4


@pytest.mark.parametrize("eagerly", [True, False])
def test_a_function_with_a_signature_gets_tensors(eagerly: bool) -> None:
    class Scaled:
        @tf.function(input_signature=[SCALAR, SCALAR])
        def call(self, x: Any, y: Any = 2) -> Any:
            assert x.dtype == y.dtype == tf.float32
            return x / y

        @tf.function(input_signature=[{"a": SCALAR, "b": (SCALAR, SCALAR)}, SCALAR])
        def nested(self, x: Any, y: Any = 2, scale: int = 1) -> Any:
            assert {x["a"].dtype, x["b"][1].dtype, y.dtype} == {tf.float32}
            assert scale == 1
            return x["a"] * x["b"][0] + x["b"][1] / y

        @tf.function
        def free(self, x: Any, *, y: Any = 2) -> Any:
            return x / y

    it = Scaled()
    for call, expected in [
        (lambda: it.call(3, 2), 1.5),
        (lambda: it.call(3), 1.5),
        (lambda: it.call(y=2, x=3), 1.5),
        (lambda: it.nested({"a": 2, "b": (3, 1)}, y=4), 6.25),
        (lambda: it.nested({"a": 2, "b": (3, 1)}), 6.5),
        (lambda: it.free(3, y=4), 0.75),
    ]:
        assert float(in_step(call, eagerly)) == expected


def test_jit_compile_is_kept_with_its_gradients() -> None:
    x = tf.Variable(3.0)

    @tf.function(jit_compile=True)
    def cube(scale: Any) -> Any:
        return scale * x**3

    @tf.function(jit_compile=True)
    def positive(y: Any) -> Any:
        return y if y > 0 else -y  # AutoGraph makes it a branch

    def step() -> Any:
        with tf.GradientTape() as tape:
            y = cube(tf.constant(2.0)) + cube(tf.constant(1.0))
        return positive(-y), tape.gradient(y, x)

    cube(tf.constant(1.0))  # traced before
    assert is_compiled(step)
    assert [float(t) for t in in_step(step)] == [81, 81]
    assert not is_compiled(lambda: tf.function(lambda: x + 1)())
    assert not is_compiled(step, xla=True)  # all of the step is


def test_a_compiled_function_finds_the_step() -> None:
    """Statistics and losses in it are those of a share of the batch."""
    norm, loss = keras.layers.BatchNormalization(), keras.losses.MeanSquaredError()
    norm.build((None, 2))
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    shares: list[StepContext] = []

    @tf.function(jit_compile=True)
    def penalty() -> Any:
        return loss(x, tf.zeros_like(norm(x, training=True)), sample_weight=tf.constant([1.0, 3]))

    def step() -> Any:
        counted = [tf.constant(8.0, tf.float64), tf.constant(4.0, tf.float64)]
        share = StepContext(tf.constant(0.5, tf.float64), denominators=counted, uniform=False)
        shares.append(share)
        with keras_patches(share):
            return penalty(), penalty()

    penalty()
    first, second = tf.function(step, autograph=False)()
    assert (float(first), float(second)) == (10, 20)  # (2.5 + 3 * 12.5) / 8 / 0.5, and by 4
    assert id(norm.moving_mean) in shares[-1].assigned


class Sums(GradientCollectives):
    """Of one rank."""

    def reduce(self, gradients: Any, weight: Any, order: Any, *, compressed: bool = True) -> Any:
        return gradients

    def sum(self, vector: Any, order: Any) -> Any:
        return vector


@pytest.mark.parametrize("settings", [{"collectives": Sums()}, {"capture": True}])
def test_a_compiled_function_that_updates_weights_is_refused(settings: dict[str, Any]) -> None:
    optimizer, variable = keras.optimizers.SGD(1.0), keras.Variable(1.0)
    optimizer.build([variable])

    @tf.function(jit_compile=True)
    def update() -> None:
        optimizer.apply([tf.constant(1.0)], [variable])

    with pytest.raises(ModelError, match=r"update is a tf\.function with jit"):
        in_step(update, **settings)
    in_step(update)
    assert float(variable) == 0


def test_a_compiled_function_that_communicates_is_refused() -> None:
    loss = keras.losses.MeanSquaredError()

    @tf.function(jit_compile=True)
    def weighted() -> Any:
        return loss(tf.ones([2, 1]), tf.zeros([2, 1]), sample_weight=tf.constant([1.0, 3.0]))

    settings: dict[str, Any] = {"collectives": Sums(), "uniform": False}
    with pytest.raises(ModelError, match="a loss counts what it is divided by on all ranks"):
        in_step(weighted, **settings)
    assert float(in_step(tf.function(weighted.python_function), **settings)) == 2


def test_a_compiled_function_counts_denominators_in_the_step() -> None:
    loss = keras.losses.MeanSquaredError()

    @tf.function(jit_compile=True)
    def weighted() -> Any:
        return loss(tf.ones([2, 1]), tf.zeros([2, 1]), sample_weight=tf.constant([1.0, 3.0]))

    def step() -> Any:
        share = context(denominators=[], record=True, uniform=False)
        with keras_patches(share):
            weighted()
        return share.denominators

    assert [float(t) for t in tf.function(step, autograph=False)()] == [2]


def test_jit_compile_without_effect_is_said() -> None:
    double = tf.function(lambda: tf.constant(2.0), jit_compile=True)
    with pytest.warns(UserWarning, match="has no effect: the step runs eagerly"):
        assert float(in_step(double, eagerly=True)) == 2
    with keras.StatelessScope(), pytest.warns(UserWarning, match="until the step ends"):
        assert not is_compiled(double)
