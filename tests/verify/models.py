"""Models whose loss cannot be split, sound ones of the same shape, and their training."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from ktrainer import Trainer, all_gather
from ktrainer.verify.verify_mode import VARIABLE, RecordingDone, VerifyRun
from tests.contracts import running
from tests.contracts.zoo import ZOO
from tests.contracts.zoo_parts import floats
from tests.dist.harness import keras_state

ROWS = 16


def net(cls: type = keras.Model, width: int = 5) -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(7, activation="tanh")(inputs)
    return cls(inputs, layers.Dense(width)(layers.Dropout(0.3)(hidden)))


class SumStep(keras.Model):
    """A step of its own whose loss is a sum over examples."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x, training=True) - y))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}


class SumLoss(keras.Model):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return tf.reduce_sum(tf.square(y_pred - y))


class Contrastive(keras.Model):
    """NT-Xent of two views of each example."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        first, second = ops.normalize(y_pred), ops.normalize(y)
        scores = ops.matmul(first, ops.transpose(second)) / 0.5
        each = keras.losses.sparse_categorical_crossentropy(
            ops.arange(ops.shape(scores)[0]), scores, from_logits=True
        )
        return ops.mean(each)


class Counting(keras.Model):
    """Sound, and keeps a count in Python, a variable of TensorFlow's, and one of Keras'."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.calls = 0
        self.raw = tf.Variable(0.0)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        self.calls += 1
        self.raw.assign_add(1.0)
        self.count.assign(self.count + 1)
        return ops.mean(ops.square(y_pred - y))


class Vector(keras.Model):
    """One number an example: a sum over all of them, counted whole on every rank."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return ops.sum(ops.square(y_pred - y), -1)


class Gathering(Contrastive):
    """The same, of the examples of all ranks."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return super().compute_loss(x, all_gather(y), all_gather(y_pred))


class CoupledCall(keras.Model):
    """Its outputs are relative to the mean of the batch."""

    def call(self, x: Any, training: bool | None = None) -> Any:
        y = super().call(x, training=training)
        return y - ops.mean(y, axis=0)


PLANTED = {"sum_step": SumStep, "sum_loss": SumLoss, "contrastive": Contrastive}
COUPLED = {"coupled_call": CoupledCall}


class UnbuiltProduct(keras.Model):
    """Adds a product over the whole batch, as Keras' collaborative filtering does."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = layers.Dense(4), layers.Dense(4), layers.Dense(5)

    def call(self, x: Any) -> Any:
        left, right = self.left(x), self.right(x)
        return self.out(left) + ops.tensordot(left, right, 2)


def make_planted(name: str) -> tuple[keras.Model, Any]:
    model = UnbuiltProduct() if name == "unbuilt" else net((PLANTED | COUPLED)[name])
    model.compile(keras.optimizers.SGD(0.01), None if name in PLANTED else "mse")
    return model, (floats(ROWS, 8), floats(ROWS, 5, seed=1))


def sampling() -> tuple[keras.Model, Any]:
    """A contrastive loss of outputs that are drawn, as those of a variational autoencoder."""
    seeds = keras.random.SeedGenerator(1)

    class Sampling(Contrastive):
        def call(self, x: Any, training: bool | None = None) -> Any:
            y = super().call(x, training=training)
            return y + keras.random.normal(ops.shape(y), seed=seeds)

    model = net(Sampling)
    model.compile("sgd")
    return model, (floats(ROWS, 8), floats(ROWS, 5, seed=1))


def config(**backend: Any) -> dict[str, Any]:
    return running.config(backend=backend, trainer={"epochs": 1}, data={"batch_size": ROWS})


@running.unhurried()
def said(
    names: list[str], floatx: str, scope: str = "local", **backend: Any
) -> dict[str, list[str]]:
    """What a run of each planted model warns of."""
    given = config(**backend)
    given["trainer"] |= {"loss_scope": scope}
    found = {}
    for name in names:
        keras_state.clear()
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(floatx)
        with warnings.catch_warnings(record=True) as caught, Trainer(given) as trainer:
            warnings.simplefilter("always")
            trainer.fit(*make_planted(name))
        found[name] = checks(caught)
    return found


def checks(caught: Any) -> list[str]:
    said = [str(w.message) for w in caught]
    return [text for text in said if any(words in text for words in running.NOT_AS_ONE_PROCESS)]


# Models that draw random numbers, or move statistics, which a check might change.
MOVING = ("batch_norm_cnn", "synchronized_batch_norm", "transformer", "vae", "averaged_weights")


@running.unhurried()
def quiet(names: list[str], **backend: Any) -> dict[str, list[str]]:
    """What models of the zoo are warned of; `MOVING` ones must also train to the last bit as with
    the check off."""
    found = {}
    for name in names:
        both = []
        for verify in ("auto", "off") if name in MOVING else ("auto",):
            keras_state.clear()
            running.use_float64()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                both.append(
                    running.with_ktrainer(
                        ZOO[name],
                        validate=False,
                        backend=backend,
                        trainer={"epochs": 1},
                        health={"verify": verify},
                    )
                )
            if verify == "auto":
                found[name] = checks(caught)
        for other in both[1:]:
            running.assert_same(both[0], other)
    return found


def mixed(floatx: str = "mixed_bfloat16") -> tuple[keras.Model, Any]:
    """A convolution, statistics, dropout and attention in half precision."""
    inputs = keras.Input((8, 8, 3), dtype="float32")
    x = layers.Conv2D(6, 3, dtype=floatx)(inputs)
    x = layers.BatchNormalization(dtype=floatx)(x)
    x = layers.MaxPooling2D(dtype=floatx)(layers.ReLU(dtype=floatx)(x))
    x = layers.Reshape((9, 6), dtype=floatx)(x)
    x = layers.MultiHeadAttention(2, 3, dropout=0.2, dtype=floatx)(x, x)
    x = layers.GlobalAveragePooling1D(dtype=floatx)(x)
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), loss)
    return model, (floats(ROWS, 8, 8, 3).astype("float32"), np.arange(ROWS) % 3)


class Steps(keras.Model):
    """Counts its steps, in an integer."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        zeros, kind = keras.initializers.Zeros(), {"dtype": "int32", "trainable": False}
        self.steps = self.add_weight(shape=(), initializer=zeros, name="steps", **kind)

    def compute_loss(self, *args: Any, **named: Any) -> Any:
        self.steps.assign(self.steps + 1)
        return super().compute_loss(*args, **named)


def record(role: Literal["unsplit", "split"], folder: str, rate: float, **settings: Any) -> None:
    """Record the first two updates as `ktrainer verify` does, in float32."""
    keras_state.clear()
    keras.utils.set_random_seed(running.SEED)
    model, data = net(Steps), (floats(4 * ROWS, 8), floats(4 * ROWS, 5, seed=1))
    model.compile(keras.optimizers.SGD(rate), "mse")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(RecordingDone):
        patch.setenv(VARIABLE, VerifyRun(role, folder, 2).to_environment()[VARIABLE])
        with Trainer(running.config(**settings)) as trainer:
            trainer.fit(model, data)
