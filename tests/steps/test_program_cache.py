"""Which calls of the Trainer compile a model's steps, and which use those that are there."""

from __future__ import annotations

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest

from ktrainer import Trainer

QUIET = {"logging": {"progress": "none"}, "trainer": {"epochs": 1}}


class Traced(keras.layers.Layer):
    """The identity; counts how often it is traced for training."""

    traces = 0

    def call(self, inputs, training=False):
        if training and not isinstance(inputs, keras.KerasTensor):
            self.traces += 1
        return inputs


def build() -> tuple[keras.Model, Traced]:
    layer = Traced()
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(2), layer, keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model, layer


@pytest.fixture
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(10, 3)).astype("float32"), rng.normal(size=(10, 1)).astype("float32")


def test_fits_of_two_models_in_turn_compile_once(data) -> None:
    (one, first), (two, second) = build(), build()
    with Trainer(QUIET) as trainer:
        counts = []
        for _ in range(3):
            for model in (one, two):
                trainer.fit(model, *data)
                trainer.evaluate(model, *data)
            counts.append((first.traces, second.traces))
    assert counts[0] == counts[1] == counts[2]
    assert min(counts[0]) > 0


def test_compile_and_other_options_are_heard_of(data) -> None:
    model, layer = build()
    with Trainer(QUIET) as trainer:
        trainer.fit(model, *data)
        traces, program = layer.traces, trainer.program_for(model)
        model.layers[-1].trainable = False
        model.compile("sgd", "mse")
        frozen = model.layers[-1].get_weights()
        trainer.fit(model, *data)
        assert layer.traces > traces
        np.testing.assert_array_equal(frozen[0], model.layers[-1].get_weights()[0])
        assert trainer.program_for(model) is trainer.program_for(model) is not program
    with Trainer({"trainer": {"clip": {"norm": 1.0}}}) as other:
        assert other.program_for(model) is not program


def test_as_in_keras_weights_are_frozen_by_the_next_compile(data) -> None:
    """A restart inside the second fit would freeze them before, so a warning names them."""
    for train in (keras.Model.fit, Trainer(QUIET).fit):
        model, _ = build()
        train(model, *data, verbose=0)
        before = model.layers[-1].get_weights()[0]
        model.layers[-1].trainable = False
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", UserWarning)
            train(model, *data, verbose=0)
        assert not np.array_equal(before, model.layers[-1].get_weights()[0])
    name = model.layers[-1].name
    (text,) = [str(each.message) for each in said if "changed `trainable`" in str(each.message)]
    assert f"{name} of the model" in text
    with pytest.warns(UserWarning, match="changed `trainable`"):  # still frozen
        train(model, *data, verbose=0)
    model.layers[-1].trainable = True  # as when the step was compiled
    train(model, *data, verbose=0)
    model.layers[-1].trainable = False
    model.compile("sgd", "mse")
    train(model, *data, verbose=0)


def test_a_model_and_its_programs_go_together(data) -> None:
    model, layer = build()
    with Trainer(QUIET) as trainer:
        trainer.fit(model, *data)
        trainer.fit(build()[0], *data)
        gone = weakref.ref(model)
        del model, layer
        keras.backend.clear_session()
        gc.collect()
        assert gone() is None
