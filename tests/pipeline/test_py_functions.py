"""Python functions that are differentiated: with the values of the right microbatch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from ktrainer import ModelError
from tests.pipeline.test_program import PIPELINE, make
from tests.small import data


def _in_python(function: Callable[[Any], Any], x: Any) -> Any:
    return tf.ensure_shape(tf.py_function(function, [x], x.dtype), x.shape)


def _square(x: Any) -> Any:
    return _in_python(lambda x: x * x, x)


class Squares(layers.Layer):
    """Squares its input in Python, so that the gradient depends on the microbatch."""

    def call(self, x: Any) -> Any:
        return _square(x)


class SquaresInside(layers.Layer):
    """The same, in a function of TensorFlow's that calls another one."""

    def call(self, x: Any) -> Any:
        inner = tf.function(_square)
        return tf.function(lambda x: inner(x))(x)


class Backwards(layers.Layer):
    """A gradient of its own, in Python, which needs no other run of Python code."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def twice(x: Any) -> Any:
            return 2 * x, lambda dy: _in_python(lambda dy: 2 * dy, dy)

        return twice(x)


def _build(layer: type[layers.Layer]) -> keras.Model:
    keras.utils.set_random_seed(1)
    inner = [layers.Dense(5, "tanh", name="a"), layer(name="python"), layers.Dense(3, name="b")]
    model = keras.Sequential([keras.Input((6,)), *inner])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _by_the_side() -> keras.Model:
    """The function's gradient is that of a weight, not of what the stage receives."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    aside = Squares(name="python")(layers.Dense(3, "tanh", name="aside")(inputs))
    main = layers.Dense(3, name="b")(layers.Dense(5, "tanh", name="a")(inputs))
    model = keras.Model(inputs, layers.Add(name="sum")([main, aside]))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _outputs(backend: dict[str, Any] | None, build: Callable[[], Any]) -> Any:
    """What a model that was trained makes of its data: with every weight."""
    words = {} if backend is None else {"backend": {**PIPELINE["backend"], **backend}}
    with make(words) as trainer:
        trainer.fit(build, data())
        return trainer.predict(trainer.model, data()[0])


def _check(build: Callable[[], Any], **backend: Any) -> None:
    np.testing.assert_allclose(_outputs(backend, build), _outputs(None, build), 1e-5, 1e-6)


@pytest.mark.parametrize("layer", [Squares, SquaresInside])
def test_two_microbatches_at_a_time_are_refused(layer: type[layers.Layer]) -> None:
    with pytest.raises(ModelError, match=r"tf\.py_function.*backend\.recompute=true"):
        _outputs({"schedule": "gpipe"}, lambda: _build(layer))


def test_one_microbatch_at_a_time_needs_nothing() -> None:
    _check(lambda: _build(Squares))  # under 1f1b the last stage goes back at once
    _check(lambda: _build(Backwards), schedule="gpipe")


def test_recomputation_runs_the_function_again() -> None:
    """Also where the stage ends behind it, so that nothing else needs what it makes."""
    cut = {"schedule": "interleaved", "chunks": 2, "stages": {"0": "a|python", "1": "b"}}
    _check(lambda: _build(SquaresInside), recompute=True, microbatches=4, **cut)


def test_recomputation_when_gradients_of_weights_come_late(ranks: Callable[..., Any]) -> None:
    late = {"partitions": 2, "microbatches": 4, "schedule": "zero_bubble", "recompute": True}
    stages = {"0": "a", "1": "aside|python|b|sum"}
    expected = _outputs(None, _by_the_side)
    for ours in ranks(2).run(_outputs, {**late, "stages": stages}, _by_the_side):
        np.testing.assert_allclose(ours, expected, 1e-5, 1e-6)
