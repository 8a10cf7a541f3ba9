"""Random numbers that are the same for every example, however a batch is split.

A random tensor varies along its last axis alone, and element i of that axis does not depend on how
many there are: each example draws the same, in a batch of any size, wherever the examples are in
the shape. Dropout thus keeps the same features of every example.

Replaced are the random functions of Keras' TensorFlow backend, `tf.random` and
`tf.random.Generator`. Random numbers from elsewhere (NumPy's) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import random as keras_random
from tensorflow.python.ops import random_ops

from ktrainer.runtime.monkeypatching import entered_in_this_thread, replaced_in

_GOLDEN = 0.6180339887498949
_EDGE = 1e-3  # keeps the inverse of a distribution finite


class RandomDraws:
    """Numbers the draws of a step, so that they differ from one another.

    Args:
        alike: give all draws the same values, as steps must that are traced in several pieces.
    """

    def __init__(self, alike: bool = False) -> None:
        self._alike, self._drawn = alike, 0

    def restart(self) -> None:
        """Let the next step draw what the one before drew."""
        self._drawn = 0

    def uniform(self, shape: Any, first: float | None = None) -> tf.Tensor:
        """Float64 numbers between 0 and 1 in the given shape.

        Args:
            first: what the first element is, instead of this draw's own.
        """
        if first is None:
            self._drawn += not self._alike
            first = _van_der_corput(max(1, self._drawn))
        shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
        row = tf.constant(first, tf.float64)
        if shape.shape.rank and shape.shape[0] != 1:  # a shape of one axis: the examples
            row += _GOLDEN * tf.cast(tf.range(shape[-1]), tf.float64)
        return tf.broadcast_to(_EDGE + (1 - 2 * _EDGE) * (row % 1.0), shape)


@contextmanager
def batch_invariant_random(draws: RandomDraws) -> Iterator[None]:
    """Replace random functions inside the block, in this thread and in those of its replicas: data
    sources draw what they always do."""
    random = _Functions(draws)
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        *((keras_random, name, getattr(random, f"keras_{name}")) for name in _OF_KERAS),
        *((tf.random, name, getattr(random, name)) for name in _OF_TENSORFLOW),
        (random_ops, "random_normal", random.normal),
        (random_ops, "random_uniform", random.uniform),  # tf.nn.dropout draws from it
        (tf.random.Generator, "normal", lambda self, *args, **named: random.normal(*args, **named)),
        (
            tf.random.Generator,
            "uniform",
            lambda self, *args, **named: random.uniform(*args, **named),
        ),
    ]
    with entered_in_this_thread(random), replaced_in(random, replaced):
        yield


@contextmanager
def frozen_batch_norm() -> Iterator[None]:
    """Let BatchNormalization use and keep its moving statistics inside the block."""
    layer = keras.layers.BatchNormalization
    original = layer.call

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return original(self, inputs, training=False, mask=mask)

    scope = object()
    with entered_in_this_thread(scope), replaced_in(scope, [(layer, "call", call)]):
        yield


_OF_KERAS = (
    "normal",
    "uniform",
    "truncated_normal",
    "categorical",
    "randint",
    "dropout",
    "shuffle",
    "gamma",
    "binomial",
    "beta",
)
_OF_TENSORFLOW = (
    "normal",
    "uniform",
    "truncated_normal",
    "categorical",
    "shuffle",
    "stateless_normal",
    "stateless_uniform",
    "stateless_truncated_normal",
    "stateless_categorical",
)


class _Functions:
    """The replacements: those of Keras' backend, with its arguments, and those of TensorFlow."""

    def __init__(self, draws: RandomDraws) -> None:
        self._draws = draws

    def keras_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> tf.Tensor:
        return self.normal(shape, mean, stddev, dtype or keras.config.floatx())

    def keras_uniform(
        self, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> tf.Tensor:
        return self.uniform(shape, minval, maxval, dtype or keras.config.floatx())

    def keras_randint(
        self, shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None
    ) -> tf.Tensor:
        return tf.cast(self.uniform(shape, minval, maxval, tf.int64), dtype)

    def keras_truncated_normal(
        self, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, seed: Any = None
    ) -> tf.Tensor:
        return self.truncated_normal(shape, mean, stddev, dtype or keras.config.floatx())

    def keras_categorical(
        self, logits: Any, num_samples: Any, dtype: Any = "int64", seed: Any = None
    ) -> tf.Tensor:
        return self.categorical(logits, num_samples, dtype)

    def keras_dropout(
        self, inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None
    ) -> tf.Tensor:
        shape = keras_random._get_concrete_noise_shape(inputs, noise_shape)
        rate = tf.cast(rate, tf.float64)
        # The first feature stays up to a rate of a half: an example must not vanish.
        kept = tf.cast(self._draws.uniform(shape, first=0.5) >= rate, inputs.dtype)
        return inputs * kept / tf.cast(tf.maximum(1.0 - rate, 1e-6), inputs.dtype)

    def keras_shuffle(self, x: Any, axis: int = 0, seed: Any = None) -> Any:
        return x

    def keras_gamma(self, shape: Any, alpha: Any, dtype: Any = None, seed: Any = None) -> tf.Tensor:
        return _everywhere(alpha, shape, dtype)

    def keras_binomial(
        self, shape: Any, counts: Any, probabilities: Any, dtype: Any = None, seed: Any = None
    ) -> tf.Tensor:
        dtype = dtype or keras.config.floatx()
        mean = tf.cast(counts, tf.float64) * tf.cast(probabilities, tf.float64)
        return _everywhere(tf.round(mean), shape, dtype)

    def keras_beta(
        self, shape: Any, alpha: Any, beta: Any, dtype: Any = None, seed: Any = None
    ) -> tf.Tensor:
        alpha, beta = tf.cast(alpha, tf.float64), tf.cast(beta, tf.float64)
        return _everywhere(alpha / (alpha + beta), shape, dtype)

    def normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = tf.float32,
        seed: Any = None,
        name: str | None = None,
    ) -> tf.Tensor:
        values = tf.cast(tf.math.ndtri(self._draws.uniform(shape)), dtype)
        return values * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    def truncated_normal(
        self,
        shape: Any,
        mean: Any = 0.0,
        stddev: Any = 1.0,
        dtype: Any = tf.float32,
        seed: Any = None,
        name: str | None = None,
    ) -> tf.Tensor:
        inside = 0.0228 + 0.9544 * self._draws.uniform(shape)  # within two standard deviations
        values = tf.cast(tf.math.ndtri(inside), dtype)
        return values * tf.cast(stddev, dtype) + tf.cast(mean, dtype)

    def uniform(
        self,
        shape: Any,
        minval: Any = 0,
        maxval: Any = None,
        dtype: Any = tf.float32,
        seed: Any = None,
        name: str | None = None,
    ) -> tf.Tensor:
        low = tf.cast(0 if minval is None else minval, tf.float64)
        high = tf.cast(1 if maxval is None else maxval, tf.float64)
        return tf.cast(low + (high - low) * self._draws.uniform(shape), dtype)

    def categorical(
        self,
        logits: Any,
        num_samples: Any,
        dtype: Any = None,
        seed: Any = None,
        name: str | None = None,
    ) -> tf.Tensor:
        classes = tf.shape(logits)[1]
        noise = -tf.math.log(-tf.math.log(self._draws.uniform([num_samples, classes])))
        scores = tf.cast(logits, tf.float64)[:, None, :] + noise[None]
        return tf.argmax(tf.ensure_shape(scores, [None, None, None]), -1, dtype or tf.int64)

    def shuffle(self, value: Any, seed: Any = None, name: str | None = None) -> Any:
        return value

    def stateless_normal(self, shape: Any, seed: Any, *args: Any, **named: Any) -> tf.Tensor:
        return self.normal(shape, *args, **_known(named))

    def stateless_uniform(self, shape: Any, seed: Any, *args: Any, **named: Any) -> tf.Tensor:
        return self.uniform(shape, *args, **_known(named))

    def stateless_truncated_normal(
        self, shape: Any, seed: Any, *args: Any, **named: Any
    ) -> tf.Tensor:
        return self.truncated_normal(shape, *args, **_known(named))

    def stateless_categorical(
        self, logits: Any, num_samples: Any, seed: Any, dtype: Any = tf.int64, name: Any = None
    ) -> tf.Tensor:
        return self.categorical(logits, num_samples, dtype)


def _known(named: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in named.items() if key not in ("alg", "name")}


def _everywhere(value: Any, shape: Any, dtype: Any) -> tf.Tensor:
    return tf.broadcast_to(tf.cast(value, dtype or keras.config.floatx()), shape)


def _van_der_corput(number: int) -> float:
    """A half, a quarter, three quarters, an eighth, ...: they spread evenly."""
    value, digit = 0.0, 0.5
    while number:
        value += digit * (number % 2)
        number, digit = number // 2, digit / 2
    return value
