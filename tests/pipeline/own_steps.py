"""Models with steps of their own, and what they become in one process and in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from ktrainer import Trainer, partition
from ktrainer.errors import KtrainerError
from ktrainer.steps.variable_placement import placement_of
from tests.pipeline.trained import Filter, Spectrum

ROWS = 26  # batches of 8, 8, 8 and 2
WORDS = ("data.batch_size=8", "data.shuffle=false", "logging.progress=none", "logging.csv=false")


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    x = random.normal(size=(ROWS, 5))
    return x, np.tanh(x[:, :2] - x[:, 2:4])


def dense(units: int, seed: int, **more: Any) -> layers.Dense:
    made = keras.initializers.GlorotUniform(seed=seed)
    return layers.Dense(units, kernel_initializer=made, name=f"d{seed}", **more)


class Base(keras.Model):
    """Dense layers, of which the first and the last have a regulariser."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [
            dense(8, 1, activation="tanh", kernel_regularizer="l2"),
            dense(7, 2, activation="tanh", activity_regularizer=keras.regularizers.L2(0.01)),
            dense(6, 3, activation="tanh"),
            dense(2, 4, bias_regularizer="l1", kernel_regularizer="l2"),
        ]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Usual(Base):
    """As in Keras' guide: the compiled loss, and metrics."""

    def train_step(self, batch: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted, weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weights)
        return {m.name: m.result() for m in self.metrics}


class Coupled(Base):
    """A loss that is no mean of rows, clipped gradients, a variable of the step's own, its own
    evaluation and prediction, inputs that the step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = keras.metrics.Mean(name="loss")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def _loss(self, y: Any, predicted: Any) -> Any:
        errors = ops.sum(ops.square(y - predicted * self.scale), axis=-1)
        return ops.logsumexp(errors) + ops.std(predicted) + ops.sum(errors) / 100

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(2 * x, training=True)
            loss = self._loss(y, predicted) + self.losses[0] * 0 + ops.sum(self.losses)
        variables = self.trainable_weights
        gradients = tape.gradient(loss, variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.3)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.total.update_state(loss)
        return {"loss": self.total.result(), "norm": norm}

    def test_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self._loss(y, self(2 * x, training=False))
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    def predict_step(self, batch: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return 3 * self(2 * x, training=False)


class Twice(Base):
    """Two calls of the model and two updates in a step, and a gradient with respect to inputs."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            one = self(x, training=True)
            fit = ops.mean(ops.square(y - one))
        away = tape.gradient(fit, x)
        first = tape.gradient(fit, self.trainable_variables)
        self.optimizer.apply(first, self.trainable_variables)
        with tf.GradientTape() as tape:
            other = self(x + 3 * tf.stop_gradient(away), training=True)
            loss = ops.mean(ops.square(y - other)) + ops.mean(ops.square(other - self(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss, "fit": fit}


class Tied(keras.Model):
    """An embedding that is the last layer too, looked up in the first, with masks."""

    def __init__(self) -> None:
        super().__init__()
        made = keras.initializers.RandomNormal(seed=3)
        self.embed = layers.Embedding(9, 6, mask_zero=True, embeddings_initializer=made)
        self.other = layers.Embedding(9, 6, embeddings_initializer=made)
        self.parts = [dense(6, 1, activation="tanh"), dense(6, 2, activation="tanh")]

    def call(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x) + self.other(tokens)
        return ops.matmul(x, ops.transpose(self.embed.embeddings))

    train_step = Usual.train_step


class Spectral(Base):
    """Complex numbers between stages, beside a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum, self.filter = Spectrum(), Filter()

    def call(self, x: Any) -> Any:
        first, second, third, last = self.parts
        with partition(0):
            x = first(x)
            z = self.spectrum(x)
        with partition(1):
            x = second(x + self.filter(z))
        with partition(2):
            return last(third(x))

    train_step = Usual.train_step


class Dropped(Tied):
    """Draws a mask in each microbatch, of which a replica has fewer in a short batch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = layers.Dropout(0.5, seed=6)

    def call(self, tokens: Any, training: bool | None = None) -> Any:
        return self.drop(super().call(tokens), training=training)


def usual() -> keras.Model:
    model = Usual()
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse", metrics=["mae"])
    return model


def coupled() -> keras.Model:
    model = Coupled()
    model.compile(keras.optimizers.AdamW(0.01))
    return model


def twice() -> keras.Model:
    model = Twice()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True), "mse", metrics=["mae"])
    return model


def tied() -> keras.Model:
    model = Tied()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    return model


def spectral() -> keras.Model:
    model = Spectral()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def dropped() -> keras.Model:
    model = Dropped()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    return model


def tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(4)
    x = random.integers(0, 9, (ROWS, 4))
    return x, np.roll(x, 1, 1)


def trained(build: Callable[[], keras.Model], *words: str, seen: Any = data) -> dict[str, Any]:
    """What training leaves on this rank: history, evaluation, predictions, variables held."""
    keras.utils.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    given = seen()
    with Trainer(overrides=[*WORDS, "trainer.epochs=2", *words]) as trainer:
        history = trainer.fit(build, given, validation_data=given).history
        return _left(trainer, history, given)


def _left(trainer: Any, history: Any, given: Any) -> dict[str, Any]:
    model = trainer.model
    placement = placement_of(model)
    variables = [*model.variables, *model.optimizer.variables]
    return {
        "history": {k: np.array(v) for k, v in history.items()},
        "evaluated": trainer.evaluate(model, given),
        "predicted": trainer.predict(model, given[0]),
        "variables": {
            f"{k}:{v.path}": v.numpy()
            for k, v in enumerate(variables)
            if placement is None or placement.holds(v)
        },
    }


class Refused(Base):
    """Steps that a pipeline refuses, by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.which = name
        self.other = keras.optimizers.SGD() if name == "two_optimizers" else None

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        if self.which == "no_call":
            return {"loss": ops.mean(x)}
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            if self.which == "layers":
                predicted += ops.sum(self.parts[0](x)) + ops.sum(self.parts[3](ops.ones((1, 6))))
            loss = ops.mean(ops.square(y - predicted))
            if self.which == "penalty":
                loss += 0.1 * sum(ops.sum(v**2) for v in self.trainable_variables)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if self.which == "combined":
            norm = ops.sqrt(sum(ops.sum(g**2) for g in gradients))
            gradients = [g / norm for g in gradients]
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def refused(names: list[str], *words: str) -> dict[str, str]:
    """What is said of each of the steps that are refused."""
    said = {}
    for name in names:
        more = ("trainer.accumulate=2",) if name == "accumulate" else ()

        def build(name: str = name) -> keras.Model:
            model = Refused(name)
            model.compile("sgd", "mse")
            return model

        with Trainer(overrides=[*WORDS, *words, *more]) as trainer:
            try:
                trainer.fit(build, data())
            except KtrainerError as error:
                said[name] = " ".join([str(error), *getattr(error, "__notes__", ())])
    return said


class Interrupted(Base):
    """Fails between the forward and the backward passes."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True)))
            loss = tf.debugging.check_numerics(loss / 0, "the loss of this script")
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


def interrupted(*words: str) -> list[str]:
    """What is said by a step that fails, and by the next one, after its error was caught."""
    said = []
    keras.utils.clear_session()

    def build() -> keras.Model:
        model = Interrupted()
        model.compile("sgd", "mse")
        return model

    with Trainer(overrides=[*WORDS, *words]) as trainer:
        for model in (build, None):
            try:
                trainer.fit(model or trainer.model, data())
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said
