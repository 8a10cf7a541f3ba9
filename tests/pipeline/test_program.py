"""What users do with a pipeline beside one `fit`, in one process: one partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import ConfigError, ModelError, Trainer
from tests.small import data, weights

PIPELINE = {"backend": {"name": "pipeline", "partitions": 1, "microbatches": 2}}


def make(more: dict[str, Any] | None = None, **trainer: Any) -> Trainer:
    config = {
        "trainer": trainer,
        "data": {"batch_size": 8, "shuffle": False},
        "logging": {"progress": "none", "csv": False},
        "checkpoint": {"resume": "never"},
    }
    return Trainer({**config, **(PIPELINE if more is None else more)})


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with make() as it:
        yield it


def build(optimizer: Any = "sgd", layer: Any = None, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    middle = [layer] if layer is not None else []
    model = keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), *middle, layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, **{"loss": loss, **compiled})
    return model


class Penalty(layers.Layer):
    """The model's only loss, added inside."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def test_predict_and_evaluate_without_fit(trainer: Trainer) -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    x, y = data()
    np.testing.assert_allclose(trainer.predict(model, x), model(x), rtol=1e-5)
    compiled = build()
    logs = trainer.evaluate(compiled, (x, y))
    np.testing.assert_allclose(logs["loss"], compiled.evaluate(x, y, verbose=0), rtol=1e-5)


def test_predict_of_a_compiled_model_comes_before_anything_else(trainer: Trainer) -> None:
    model, (x, y) = build(metrics=["accuracy"]), data()
    np.testing.assert_allclose(trainer.predict(model, x), model(x), rtol=1e-5)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    for key, value in trainer.evaluate(model, (x, y)).items():
        np.testing.assert_allclose(value, expected[key], rtol=1e-5)
    trainer.fit(model, (x, y))


class Positions(keras.Model):
    """Adds to each token what belongs to its position, and so must know how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = layers.Embedding(9, 4), layers.Embedding(20, 4)
        self.head = layers.Dense(3)

    def call(self, tokens: Any) -> Any:
        places = self.places(keras.ops.arange(keras.ops.shape(tokens)[1]))
        return self.head(keras.ops.mean(self.tokens(tokens) + places, axis=1))


def _with_positions() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = Positions()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _of_many_lengths(words: dict[str, Any] | None) -> list[Any]:
    """Trained on one length, then used on others, and trained on one of those."""
    random = np.random.default_rng(0)
    tokens = {length: random.integers(0, 9, (16, length)) for length in (10, 7, 1)}
    labels = random.integers(0, 3, 16)
    with make(words) as trainer:
        model = trainer.backend.build_model(_with_positions)
        trainer.fit(model, (tokens[10], labels))
        found = [trainer.predict(model, x) for x in tokens.values()]
        found += [trainer.evaluate(model, (x, labels))["loss"] for x in tokens.values()]
        trainer.fit(model, (tokens[7], labels))
        return [*found, trainer.predict(model, tokens[10])]


def test_lengths_that_the_model_must_know() -> None:
    for ours, expected in zip(_of_many_lengths(None), _of_many_lengths({}), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


class Doubles(layers.Layer):
    """Twice its input, by a Python function that is differentiated."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda x: x * 2, [x], x.dtype), x.shape)


def test_a_python_function_is_differentiated_with_recomputation_only() -> None:
    with make() as trainer, pytest.raises(ModelError, match=r"backend\.recompute=true"):
        trainer.fit(trainer.backend.build_model(lambda: build(layer=Doubles())), data())
    found = []
    again = {"backend": {**PIPELINE["backend"], "recompute": True, "schedule": "gpipe"}}
    for words in (again, {}):
        with make(words) as trainer:
            model = build(layer=Doubles())
            trainer.fit(model, data())
            found.append(weights(model))
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_model_is_trained_on_in_several_fits(trainer: Trainer) -> None:
    model = trainer.backend.build_model(build)
    for _ in range(3):
        trainer.fit(model, data())
    with make({}) as plain:
        expected = build()
        for _ in range(3):
            plain.fit(expected, data())
        for a, b in zip(weights(model), weights(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_model_compiled_again_or_unfrozen_is_refused(trainer: Trainer) -> None:
    model = build()
    trainer.fit(model, data())
    model.layers[0].trainable = False
    with pytest.raises(ModelError, match="frozen"):
        trainer.fit(model, data())
    model.layers[0].trainable = True
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(ModelError, match="compiled again"):
        trainer.fit(model, data())
    with make() as other, pytest.raises(ModelError, match="another Trainer"):
        other.fit(model, data())


def test_the_global_seed_may_be_set_between_steps(trainer: Trainer) -> None:
    model = build(layer=layers.Dropout(0.5))
    trainer.fit(model, data())
    keras.utils.set_random_seed(5)
    trainer.fit(model, data())
    assert np.isfinite(trainer.evaluate(model, data())["loss"])


def _penalised() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Penalty()])
    model.compile("sgd")
    return model


def test_the_only_loss_is_a_layer_s(trainer: Trainer) -> None:
    history = trainer.fit(_penalised, data())
    with make({}) as plain:
        expected = plain.fit(_penalised(), data())
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"], rtol=1e-5)


def test_slots_are_told_from_the_optimizer_s_own_variables() -> None:
    """SGD without momentum has two variables of its own; this model has two weights."""
    from ktrainer.backends.pipeline.placing import build_optimizer

    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile("sgd", "mse")
    assert build_optimizer(model) == {}
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    assert set(build_optimizer(model)) == {id(m) for m in model.optimizer.momentums}


def _lengths() -> tf.data.Dataset:
    """Batches of sequences of 3, then 9, in turn: an update of two has 36 elements."""
    random = np.random.default_rng(0)

    def batches() -> Iterator[Any]:
        for length in (3, 9, 3, 9, 3, 9):
            x = random.normal(size=(3, length, 2)).astype("float32")
            yield x, x.sum(-1, keepdims=True)

    spec = tuple(tf.TensorSpec((None, None, n), tf.float32) for n in (2, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def _sequence_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((None, 2)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_accumulated_batches_of_several_lengths_count_by_elements() -> None:
    found: list[Any] = []
    for more in (PIPELINE, {}):
        with make(more, accumulate=2) as it:
            it.fit(_sequence_model, _lengths())
            found.append(weights(it))
    model = _sequence_model()  # by hand
    model.optimizer.build(model.trainable_variables)
    rows = list(_lengths())
    for (x, y), (a, b) in zip(rows[0::2], rows[1::2], strict=True):
        with tf.GradientTape() as tape:
            errors = [tf.reshape(model(p) - q, [-1]) for p, q in ((x, y), (a, b))]
            loss = tf.reduce_mean(tf.square(tf.concat(errors, 0)))
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        model.optimizer.apply(gradients)
    for ours in found:
        for a, b in zip(ours, weights(model), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: keras.callbacks.ModelCheckpoint("x.keras"),
        lambda: keras.callbacks.TensorBoard(histogram_freq=1),
    ],
)
def test_callbacks_that_need_the_whole_model_are_refused(
    trainer: Trainer, callback: Callable[[], Any]
) -> None:
    with pytest.raises(ConfigError, match=r"whole model.*trainer\.save"):
        trainer.fit(build, data(), callbacks=[callback()])


def test_models_are_let_go(trainer: Trainer) -> None:
    import gc
    import weakref

    model = build()
    trainer.fit(model, data())
    gone = weakref.ref(model)
    trainer.fit(build, data())
    del model
    gc.collect()
    assert gone() is None
