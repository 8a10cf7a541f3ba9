"""How a step is made: accumulation, clipping, precision, speed; and what a seed fixes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import Callback, ModelError
from tests.small import BATCH, ROWS, Watch, build, close, data, fit, trainer, weights

# How a step is made


@pytest.mark.parametrize("rows", [ROWS, 29])
def test_accumulation_equals_a_large_batch(rows: int) -> None:
    """29 rows: the last update has one part of one row."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras_adam = lambda: build(keras.optimizers.Adam(0.01), eager=False)  # noqa: E731
    one, large = fit(keras_adam, data(rows), trainer__epochs=2, data__batch_size=4 * BATCH)
    four, small = fit(keras_adam, data(rows), trainer__epochs=2, trainer__accumulate=4)
    assert four.progress.step == one.progress.step == 4
    close(four, one, 1e-13)
    for key in large:
        np.testing.assert_allclose(small[key], large[key], rtol=1e-12)


class Places(layers.Layer):
    """Adds weights of places, in two tables that are joined."""

    def build(self, shape: Any) -> None:
        self.tables = [self.add_weight(shape=(rows, 6)) for rows in (2, 3)]

    def call(self, x: Any) -> Any:
        table = keras.ops.concatenate(self.tables, axis=0)
        return x[:, None] + keras.ops.take(table, keras.ops.arange(5), axis=0)


class CountsBatches(keras.Model):
    """Counts its batches and weights them down, in variables of TensorFlow."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.output_layer = layers.Dense(3)
        self.seen = tf.Variable(0.0, trainable=False)
        self.left = tf.Variable(100, trainable=False)
        self.last = tf.Variable(0.0, trainable=False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.compile("sgd", loss, run_eagerly=eager)

    def call(self, x: Any) -> Any:
        return self.output_layer(x)

    def train_step(self, data: Any) -> Any:
        self.last.assign(self.seen.assign_add(1.0) * 2.0)
        self.left.assign_sub(1)
        return super().train_step(data)


@pytest.mark.parametrize("eager", [True, False])
def test_accumulation_assigns_to_variables_of_tensorflow_once_a_batch(eager: bool) -> None:
    settings = {"trainer__accumulate": 2}
    it, _ = fit(lambda: CountsBatches(eager), data(24), **settings)
    model = it.model
    assert (float(model.seen), int(model.left), float(model.last)) == (6, 94, 12)


class MarksBatches(CountsBatches):
    def train_step(self, data: Any) -> Any:
        self.last.scatter_nd_add(tf.zeros([1, 0], tf.int32), [1.0])
        return super().train_step(data)


def test_accumulation_refuses_to_assign_to_a_part_of_a_variable() -> None:
    with pytest.raises(ModelError, match="assigns to a part of"):
        fit(lambda: MarksBatches(False), data(24), trainer__accumulate=2)


def test_accumulation_with_tables_that_are_joined() -> None:
    """TensorFlow does not know how many rows of each table have a gradient."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")

    def model() -> keras.Model:
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((6,)), Places(), layers.Flatten(), layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(0.01), loss)
        return made

    one, _ = fit(model, data(29), trainer__epochs=2, data__batch_size=2 * BATCH)
    two, _ = fit(model, data(29), trainer__epochs=2, trainer__accumulate=2)
    close(two, one, 1e-13)


def _regularised_with_two_outputs() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, "tanh", kernel_regularizer="l2")(inputs)
    outputs = {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)}
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), {"a": loss, "b": loss})
    return model


def test_accumulation_with_regularised_weights_and_a_loss_for_each_output() -> None:
    """Keras keeps a mean for each output's loss, which it weighs by rows where their number is
    static: every part of an update must count as in one large batch."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x, y = data(29)
    given = (x, {"a": y, "b": y})
    model = _regularised_with_two_outputs
    one, large = fit(model, given, trainer__epochs=2, data__batch_size=4 * BATCH)
    four, small = fit(model, given, trainer__epochs=2, trainer__accumulate=4)
    close(four, one, 1e-13)
    assert {"loss", "a_loss", "b_loss"} <= large.keys()
    for key in large:
        np.testing.assert_allclose(small[key], large[key], rtol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("global_norm", "global_clipnorm"), ("norm", "clipnorm"), ("value", "clipvalue")],
)
def test_clipping_equals_that_of_the_optimizer(ours: str, theirs: str) -> None:
    given = {"trainer__epochs": 2, f"trainer__clip__{ours}": 0.05}
    here, history = fit(**given)
    there, expected = fit(
        lambda: build(keras.optimizers.SGD(0.1, momentum=0.9, **{theirs: 0.05})), trainer__epochs=2
    )
    close(here, there, 1e-6)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)
    without, _ = fit(trainer__epochs=2)
    assert not np.allclose(weights(here)[0], weights(without)[0], atol=1e-3)


def _in_float8(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = build(optimizer, eager=False)
    for layer in model.layers:
        layer.quantize("float8")
    return model


def test_scales_of_float8_are_not_clipped_and_need_whole_batches() -> None:
    """What Keras takes for their gradients are their new values."""
    here, _ = fit(lambda: _in_float8(keras.optimizers.SGD(0.1)), trainer__clip__value=0.05)
    there, _ = fit(lambda: _in_float8(keras.optimizers.SGD(0.1, clipvalue=0.05)))
    close(here, there, 0)
    assert max(float(w.max()) for w in weights(here)) > 1  # of the largest values so far
    with pytest.raises(ModelError, match=r"largest values of a whole batch.*accumulate=1"):
        fit(lambda: _in_float8(keras.optimizers.SGD(0.1)), trainer__accumulate=2)


class Counting(layers.Layer):
    """Counts the rows that it is trained on."""

    def build(self, shape: Any) -> None:
        settings = {"initializer": "zeros", "dtype": "int64", "trainable": False}
        self.seen = self.add_weight(name="seen", shape=(), aggregation="sum", **settings)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
        return x


def test_a_skipped_update_is_counted_by_no_layer() -> None:
    x, y = data()
    x[BATCH + 1] = np.nan
    counting = Counting()

    def model() -> keras.Model:
        made = keras.Sequential([keras.Input((6,)), counting, layers.Dense(3)])
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    with pytest.warns(UserWarning, match="the update was skipped"):
        fit(model, (x, y), trainer__epochs=1, health__nan="skip")
    assert int(counting.seen) == ROWS - BATCH


def test_hooks_see_gradients_before_they_are_clipped() -> None:
    class Twice(Callback):
        def on_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
            return [2.0 * gradient for gradient in gradients]

    with trainer([Twice()], trainer__clip__value=1e9) as it:
        it.fit(build(keras.optimizers.SGD(0.05)), data())
        doubled = weights(it)
    for a, b in zip(
        doubled, weights(fit(lambda: build(keras.optimizers.SGD(0.1)))[0]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_mixed_precision_keeps_variables_in_float32() -> None:
    it, history = fit(lambda: build(eager=False), trainer__precision="mixed_bfloat16")
    assert it.model.layers[0].compute_dtype == "bfloat16"
    assert {v.dtype for v in it.model.trainable_variables} == {"float32"}
    assert np.isfinite(history["loss"]).all()


def test_float16_skips_steps_that_overflow_and_lowers_the_scale() -> None:
    def linear() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = data()
    x[5] = 100.0  # its loss is finite in 16 bits, its scaled gradients are not
    it, _ = fit(linear, (x, y), trainer__precision="mixed_float16")
    optimizer = it.model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(optimizer.dynamic_scale) == optimizer.initial_scale / 2
    assert int(optimizer.inner_optimizer.iterations) == 5
    assert all(np.isfinite(value).all() for value in weights(it))


def test_precision_of_a_model_made_before_the_trainer() -> None:
    model = build()
    with (
        trainer(trainer__precision="mixed_bfloat16") as it,
        pytest.raises(ModelError, match="Make the Trainer before the model"),
    ):
        it.fit(model, data())


@pytest.mark.quick("{'trainer__steps_per_call': 4, 'trainer__clip__norm': 1000000000.0}")
@pytest.mark.parametrize(
    "settings",
    [
        {"trainer__xla": "true"},
        {"trainer__xla": "true", "trainer__accumulate": 2, "data__batch_size": 2},
        {"trainer__steps_per_call": 3},
        {"trainer__steps_per_call": 4, "trainer__clip__norm": 1e9},
    ],
    ids=str,
)
def test_what_makes_steps_faster_does_not_change_them(settings: dict[str, Any]) -> None:
    ours, history = fit(lambda: build(eager=False), data(26), trainer__epochs=2, **settings)
    plain, expected = fit(given=data(26), trainer__epochs=2)
    close(ours, plain, 1e-5)
    assert ours.progress == _same_time(plain.progress, ours.progress)
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-5)


def _same_time(progress: Any, other: Any) -> Any:
    progress.elapsed = other.elapsed
    return progress


def test_steps_per_call_is_seen_by_callbacks() -> None:
    seen = Watch()
    settings = {"trainer__epochs": 2, "trainer__steps_per_call": 4, "trainer__max_steps": 11}
    with trainer([seen], **settings) as it:
        it.fit(build(eager=False), data())
    assert seen.steps == [4, 6, 10, 11]
    assert seen.batches == [3, 5, 3, 4]


# What repeats


def test_a_seed_fixes_weights_and_order() -> None:
    def unseeded() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dropout(0.5)])
        model.add(layers.Dense(3))
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        return model

    first, second, other = (
        weights(fit(unseeded, seed=seed, data__shuffle="true")[0]) for seed in (1, 1, 2)
    )
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert not (first[0] == other[0]).all()


def test_shuffling_draws_another_order_every_epoch() -> None:
    rows: list[float] = []

    class Order(keras.Model):
        def call(self, x: Any) -> Any:
            return x

        def train_step(self, batch: Any) -> dict[str, Any]:
            if tf.executing_eagerly():
                rows.extend(batch[0][:, 0].numpy().tolist())
            return {"loss": 0.0}

    model = Order()
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(12.0, dtype="float32")[:, None]
    fit(model, (x, x), trainer__epochs=2, data__shuffle="true")
    assert sorted(rows[:12]) == sorted(rows[12:]) == x[:, 0].tolist()
    assert rows[:12] != rows[12:]


def test_deterministic() -> None:
    both = [
        fit(lambda: build(eager=False), trainer__deterministic="true", data__shuffle="true")
        for _ in range(2)
    ]
    close(both[0][0], both[1][0], 0)
    assert both[0][1] == both[1][1]
