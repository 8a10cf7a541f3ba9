"""Small models that differ in everything a trainer could get wrong, each with data of its own.

`ZOO[name]` is a `Case`: a builder of a compiled model, a function that makes its data, and
whether several processes must give the numbers of one. Floats are of Keras' `floatx`, which a
test may set to float64 before it builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the compiled model.
        data: number of rows -> `(x, y)` or `(x, y, sample_weight)`.
        exact: whether data parallelism must equal one process. Dropout and other noise differ
            between ranks, and plain BatchNormalization sees smaller batches.
        class_weight: as in `Model.fit`.
    """

    build: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, ...]]
    exact: bool = True
    class_weight: Mapping[int, float] | None = None


ZOO: dict[str, Case] = {}


def case(
    data: Callable[[int], tuple[Any, ...]], **facts: Any
) -> Callable[[Callable[[], keras.Model]], Callable[[], keras.Model]]:
    """Put a builder into the zoo, under its own name."""

    def add(build: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
        ZOO[build.__name__] = Case(build, data, **facts)
        return build

    return add


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


@case(features_and_labels)
def mlp() -> keras.Model:
    return small_mlp(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@case(features_and_targets)
def skip_connections() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, activation="gelu")(layers.LayerNormalization()(inputs))
    outputs = layers.Dense(2)(layers.concatenate([layers.add([inputs, hidden]), inputs]))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01, amsgrad=True), "mse", metrics=["mae", "r2_score"])
    return model


@case(images, exact=False)
def batch_norm_cnn() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    metrics = ["sparse_categorical_crossentropy", "sparse_categorical_accuracy"]
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), logits_loss(), metrics=metrics)
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


@case(lambda rows: (floats(rows, 8), labels(rows, 2)))
def subclassed() -> keras.Model:
    model = Nested()
    metrics = [keras.metrics.AUC(name="auc", curve="PR"), keras.metrics.Precision(name="precision")]
    optimizer = keras.optimizers.RMSprop(0.01, momentum=0.5)
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model


def two_of_each(rows: int) -> tuple[Any, ...]:
    x = {"left": floats(rows, 5), "right": floats(rows, 3, seed=1)}
    y = {"kind": labels(rows), "size": floats(rows, 1, seed=2)}
    weights = {"kind": np.abs(floats(rows, seed=3)), "size": np.abs(floats(rows, seed=4))}
    return x, y, weights


@case(two_of_each)
def two_inputs_two_outputs() -> keras.Model:
    left, right = keras.Input((5,), name="left"), keras.Input((3,), name="right")
    both = layers.Concatenate()([layers.Dense(4, activation="relu")(left), right])
    outputs = {
        "kind": layers.Dense(3, name="kind")(both),
        "size": layers.Dense(1, name="size")(both),
    }
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        keras.optimizers.AdamW(0.01),
        loss={"kind": logits_loss(), "size": keras.losses.Huber(reduction="sum")},
        loss_weights={"kind": 1.0, "size": 0.1},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"kind": ["accuracy"], "size": []},
    )
    return model


@case(lambda rows: (sequences(rows)[0], labels(rows)), exact=False)
def transformer() -> keras.Model:
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    y = layers.MultiHeadAttention(2, 4, dropout=0.1, use_bias=False)(x, x, use_causal_mask=True)
    x = layers.add([x, layers.Dropout(0.1)(y)])
    outputs = layers.Dense(3)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Nadam(0.01), logits_loss(), metrics=["accuracy"])
    return model


@case(sequences)
def masked_lstm() -> keras.Model:
    """Sparse gradients, and a loss whose denominator is the number of tokens that count."""
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(11, 6, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), logits_loss(), metrics=["accuracy"])
    return model


class Confident(layers.Layer):
    """Adds a loss that is a mean over examples."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.mean(ops.square(x)))
        return x


@case(features_and_labels)
def regularised() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer="l2",
                bias_regularizer="l1",
                activity_regularizer=keras.regularizers.L1L2(1e-3, 1e-3),
                kernel_constraint=keras.constraints.MaxNorm(1.0),
            ),
            Confident(),
            layers.Dense(3, kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-2)),
        ]
    )
    model.compile(keras.optimizers.Lion(0.003), logits_loss(), metrics=["accuracy"])
    return model


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


@case(lambda rows: (floats(rows, 8),), exact=False)
def vae() -> keras.Model:
    model = Vae()
    model.compile(keras.optimizers.Adam(0.01))
    return model


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


@case(lambda rows: (floats(rows, 8), floats(rows, 2, seed=1)))
def gan() -> keras.Model:
    model = Gan()
    model.compile(
        [keras.optimizers.RMSprop(0.01), keras.optimizers.Adam(0.01, beta_1=0.5, use_ema=True)]
    )
    return model


@case(features_labels_and_weights)
def sample_weights() -> keras.Model:
    model = small_mlp(keras.optimizers.Adamax(0.01))
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model.compile(model.optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


@case(features_and_labels, class_weight={0: 1.0, 1: 3.0, 2: 0.2})
def class_weights() -> keras.Model:
    model = small_mlp(keras.optimizers.Adadelta(1.0))
    model.compile(model.optimizer, logits_loss(), weighted_metrics=["accuracy"])
    return model


@case(features_and_marks)
def many_metrics() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, "relu"), layers.Dense(3, activation="sigmoid")]
    )
    metrics = [
        keras.metrics.AUC(name="roc", multi_label=True, num_labels=3),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.F1Score(average="macro", threshold=0.5, name="f1"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.BinaryIoU(name="iou"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
    ]
    model.compile(keras.optimizers.Lamb(0.01), "binary_focal_crossentropy", metrics=metrics)
    return model


@case(images)
def synchronized_batch_norm() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, strides=2, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.05, 10, warmup_target=0.1, warmup_steps=2)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), logits_loss(), metrics=["accuracy"])
    return model


@case(features_and_targets)
def averaged_weights() -> keras.Model:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(6, "elu"), layers.Dense(2)])
    optimizer = keras.optimizers.Adam(
        0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4, weight_decay=0.01
    )
    model.compile(optimizer, keras.losses.LogCosh(), metrics=["mse"])
    return model


@case(features_and_labels)
def clipped() -> keras.Model:
    return small_mlp(keras.optimizers.Ftrl(0.1, global_clipnorm=0.05))


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
        return loss + 0.1 * gap

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"gap": self.gap.result()}


@case(features_and_targets)
def own_loss_and_metrics() -> keras.Model:
    model = Distilled()
    model.build((None, 8))
    optimizer = keras.optimizers.Adafactor(0.01, clipnorm=0.5)
    model.compile(optimizer, worst_error, metrics=[worst_error, "cosine_similarity"])
    return model


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, clipnorm=0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "lion": lambda: keras.optimizers.Lion(0.003),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "loss_scaled": lambda: keras.optimizers.SGD(0.05, loss_scale_factor=1024.0),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
    "multiple": lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(0.01), {".*/bias": keras.optimizers.SGD(0.1)}
        )
    ),
    "decaying": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    ),
}
