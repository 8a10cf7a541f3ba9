"""Data, layers and models with steps of their own, of which the zoo is made."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


def floats(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(rows, *shape))
    return values.astype(keras.config.floatx())


def labels(rows: int, classes: int = 3, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, rows)


def features_and_labels(rows: int) -> tuple[Any, ...]:
    return floats(rows, 8), labels(rows)


def features_and_targets(rows: int) -> tuple[Any, ...]:
    return floats(rows, 8), floats(rows, 2, seed=1)


def features_and_marks(rows: int) -> tuple[Any, ...]:
    """Several labels a row, each 0 or 1."""
    return floats(rows, 8), (floats(rows, 3, seed=1) > 0).astype(keras.config.floatx())


def features_labels_and_weights(rows: int) -> tuple[Any, ...]:
    return (*features_and_labels(rows), np.abs(floats(rows, seed=2)))


def images(rows: int) -> tuple[Any, ...]:
    return floats(rows, 8, 8, 2), labels(rows)


def sequences(rows: int, length: int = 7, words: int = 11) -> tuple[Any, ...]:
    """Token ids of sequences of different lengths, padded with 0, and a label for each token."""
    random = np.random.default_rng(3)
    x = random.integers(1, words, (rows, length))
    for row, end in zip(x, random.integers(1, length + 1, rows), strict=True):
        row[end:] = 0
    return x, random.integers(0, 3, (rows, length))


def logits_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def small_mlp(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """The model on which optimizers and kinds of data are compared."""
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, activation="tanh"), layers.Dense(3)]
    )
    model.compile(optimizer, logits_loss(), metrics=["accuracy"])
    return model


class Block(layers.Layer):
    """A layer of layers, whose variables exist only after the first call."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.parts = [layers.Dense(units, activation="relu"), layers.Dense(units)]
        self.gate = self.add_weight(shape=(units,), initializer="ones", name="gate")

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x * self.gate


class Nested(keras.Model):
    """A subclassed model that is not built when training starts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = {"first": Block(6), "second": Block(4)}
        self.head = layers.Dense(1, activation="sigmoid")

    def call(self, x: Any) -> Any:
        return self.head(self.blocks["second"](self.blocks["first"](x)))


class Judged(keras.Model):
    """A step of its own whose logs are not called like the metrics that they come from: a result
    as it is, one computed from two results, and one of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(1, activation="sigmoid")
        self.total = keras.metrics.Mean(name="total_error")
        self.parts = [keras.metrics.Precision(name="exact"), keras.metrics.Recall(name="complete")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self._loss_tracker, self.total, *self.parts]  # the first is never updated

    def call(self, x: Any) -> Any:
        return self.head(x)

    def log(self, y: Any, guess: Any, error: Any) -> dict[str, Any]:
        self.total.update_state(error)
        for part in self.parts:
            part.update_state(y, guess)
        exact, complete = (part.result() for part in self.parts)
        both = 0.5 * (exact + complete)
        return {"loss": error, "mean_error": self.total.result(), "precision": exact, "both": both}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[0], ops.cast(data[1], self.compute_dtype)
        with tf.GradientTape() as tape:
            guess = self(x, training=True)
            error = ops.mean(ops.square(y - guess))
        self.optimizer.apply(tape.gradient(error, self.trainable_weights), self.trainable_weights)
        return self.log(y, guess, error)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data[0], ops.cast(data[1], self.compute_dtype)
        guess = self(x)
        return self.log(y, guess, ops.mean(ops.square(y - guess)))


class NestedLogs(keras.Model):
    """Steps of its own that log all metrics by name, those that are compiled as one inner dict;
    some again elsewhere, and the batch's error in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def log(self, x: Any, y: Any, error: Any) -> dict[str, Any]:
        self._loss_tracker.update_state(error)
        for metric in self.metrics[1:]:
            metric.update_state(y, self(x))
        logs = {metric.name: metric.result() for metric in self.metrics}
        again = [2 * self._loss_tracker.result(), error]
        return {
            **logs,
            "inner": {"error": error, "mean": {"half": logs["loss"] / 2}},
            "list": again,
        }

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.mean(ops.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(error, self.trainable_weights), self.trainable_weights)
        return self.log(x, y, error)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return self.log(x, y, ops.mean(ops.square(y - self(x))))


class Confident(layers.Layer):
    """Adds a loss that is a mean over examples."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


class Vae(keras.Model):
    """A step of its own, trackers of its own, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(8)])
        self.seed_generator = keras.random.SeedGenerator(5)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "kl")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.trackers

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x)[:, :2])

    def losses_of(self, data: Any) -> tuple[Any, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        mean, log_variance = ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        rebuilt = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1
        kl = 0.5 * ops.mean(ops.sum(divergence, 1))
        return ops.mean(ops.sum(ops.square(x - rebuilt), 1)) + kl, kl

    def log(self, *losses: Any) -> dict[str, Any]:
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss, kl = self.losses_of(data)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.log(loss, kl)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.log(*self.losses_of(data))


class Gan(keras.Model):
    """Two networks, two optimizers, its own compile; the noise comes with the data."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(8, activation="tanh")])
        self.critic = keras.Sequential(
            [keras.Input((8,)), layers.Dense(4, activation="relu"), layers.Dense(1)]
        )

    def compile(self, optimizers: list[keras.optimizers.Optimizer]) -> None:
        super().compile()
        self.optimizers = optimizers
        self.loss_function = keras.losses.BinaryCrossentropy(from_logits=True)
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.generator_loss = keras.metrics.Mean(name="generator_loss")

    def losses_of(self, data: Any) -> tuple[Any, Any]:
        real, noise = data
        of_real, of_fake = self.critic(real), self.critic(self.generator(noise))
        ones, zeros = ops.ones_like(of_real), ops.zeros_like(of_real)
        critic_loss = self.loss_function(ones, of_real) + self.loss_function(zeros, of_fake)
        return critic_loss, self.loss_function(ones, of_fake)

    def log(self, critic_loss: Any, generator_loss: Any) -> dict[str, Any]:
        self.critic_loss.update_state(critic_loss)
        self.generator_loss.update_state(generator_loss)
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.critic_loss, self.generator_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        parts = (self.critic, self.generator)
        with tf.GradientTape(persistent=True) as tape:
            losses = self.losses_of(data)
        gradients = [
            tape.gradient(loss, part.trainable_weights)
            for loss, part in zip(losses, parts, strict=True)
        ]
        for part, optimizer, gradient in zip(parts, self.optimizers, gradients, strict=True):
            optimizer.apply(gradient, part.trainable_weights)
        return self.log(*losses)

    def test_step(self, data: Any) -> dict[str, Any]:
        return self.log(*self.losses_of(data))


def worst_error(y_true: Any, y_pred: Any) -> Any:
    """A loss that is a plain function, one number for each row."""
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


class Distilled(keras.Model):
    """A frozen part, weights used twice, and its own `compute_loss` and `compute_metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = layers.Rescaling(0.5)
        self.teacher = layers.Dense(2, trainable=False)
        self.student = layers.Dense(8, activation="tanh")
        self.head = layers.Dense(2)
        self.gap = keras.metrics.Mean(name="gap")
        self.gaps = keras.metrics.Mean(name="gaps")

    def build(self, shape: Any) -> None:
        self.teacher.build(shape)
        self.student.build(shape)
        self.head.build(shape)

    def call(self, x: Any) -> Any:
        x = self.scale(x)
        return self.head(self.student(self.student(x)))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        gap = ops.mean(ops.square(self.teacher(x) - y_pred))
        self.gap.update_state(gap)
        self.gaps.update_state([gap, 3.0 * gap])
        return loss + 0.1 * gap

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"gap": self.gap.result(), "gaps": self.gaps.result()}
