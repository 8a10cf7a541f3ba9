"""Models whose losses are of a whole batch, and what `Model.fit` makes of them in one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from ktrainer import all_gather
from tests.pipeline.equal import Notes, Outcome, configure, named, outcome_of


def dense(units: int, seed: int, activation: str | None = "tanh", **kwargs: Any) -> layers.Layer:
    """A layer with the same initial weights in every process."""
    init = keras.initializers.GlorotUniform(seed=seed)
    return layers.Dense(units, activation, kernel_initializer=init, **kwargs)


def normalised(z: Any) -> Any:
    return z / ops.sqrt(ops.sum(ops.square(z), -1, keepdims=True))


def nt_xent(_: Any, views: Any) -> Any:
    """SimCLR's loss of two views, stacked along axis 1: (examples, 2, features)."""
    z = normalised(ops.concatenate([views[:, 0], views[:, 1]], 0))
    count = ops.shape(z)[0]
    logits = ops.matmul(z, ops.transpose(z)) / 0.5
    logits = logits - 1e9 * ops.eye(count, dtype=z.dtype)
    other = (ops.arange(count) + count // 2) % count
    return ops.mean(keras.losses.sparse_categorical_crossentropy(other, logits, from_logits=True))


def simclr(floatx: str = "float64") -> keras.Model:
    """Two views stacked in one input, a compiled loss that returns a number."""
    inputs = keras.Input((2, 6))
    x = dense(8, 1, kernel_regularizer="l2")(inputs)
    x = dense(8, 2, activity_regularizer="l2")(x)
    model = keras.Model(inputs, dense(4, 4, None, kernel_regularizer="l2")(dense(8, 3)(x)))
    model.compile(keras.optimizers.Adam(0.01), nt_xent)
    return model


class Clip(keras.Model):
    """Two towers, and a loss of all pairs of their outputs, in `compute_loss`."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        image, text = map(normalised, y_pred)
        logits = ops.matmul(image, ops.transpose(text)) * 4.0
        right = ops.arange(ops.shape(logits)[0])
        of = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
        loss = ops.mean(of(right, logits) + of(right, ops.transpose(logits))) / 2
        return loss + sum(self.losses)


def clip() -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    image = dense(4, 3, None, name="image")(dense(8, 1, kernel_regularizer="l2")(a))
    text = dense(4, 4, None, name="text")(dense(8, 2)(b))
    model = Clip([a, b], [image, text])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def masked() -> keras.Model:
    """Outputs with masks, weighted targets, a compiled loss and metrics."""
    tokens = keras.Input((5,), dtype="int32")
    uniform = keras.initializers.RandomUniform(seed=5)
    x = layers.Embedding(12, 8, mask_zero=True, embeddings_initializer=uniform)(tokens)
    logits = dense(12, 3, None)(dense(8, 2)(dense(8, 1)(x)))
    model = keras.Model(tokens, logits)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, weighted_metrics=["accuracy"])
    return model


def two_losses() -> keras.Model:
    """Two outputs with losses of their own, which are logged too, and a third without one."""
    inputs = keras.Input((6,))
    x = dense(8, 1)(inputs)
    early = dense(1, 4, None, name="early")(x)
    x = dense(8, 2)(x)
    late = dense(2, 3, None, name="late")(x)
    aside = dense(2, 6, None, name="aside")(x)
    model = keras.Model(inputs, {"early": early, "late": late, "aside": aside})
    losses = {"early": "mse", "late": keras.losses.MeanAbsoluteError("sum")}
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    model.compile(scaled, losses, metrics={"late": "mse"})
    return model


WIDTH = 7  # as many as there are examples in a microbatch


class Adds(layers.Layer):
    """Adds losses of examples, of their elements, and of its weights: as many as examples."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight((WIDTH,), "ones", name="scale")

    def call(self, x: Any) -> Any:
        x = x * self.scale
        self.add_loss(0.01 * ops.sum(ops.square(x), -1))
        self.add_loss(0.02 * ops.square(x - 0.5))
        self.add_loss(0.1 * ops.square(self.scale - 0.5))
        self.add_loss(ops.mean(ops.square(x)))
        return x


class Weighs(keras.Model):
    """`compute_loss` gives the losses that layers add a weight of its own, or leaves them out."""

    weight = 0.3

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        added = sum(ops.sum(loss) for loss in self.losses) if self.weight else 0.0
        return ops.mean(ops.square(y - y_pred)) + self.weight * added


class LeavesOut(Weighs):
    weight = 0.0


def adds(kind: Any = keras.Model, loss: Any = "mse") -> keras.Model:
    """Layers on every stage that add vectors, which Keras sums."""
    inputs = keras.Input((6,))
    x = Adds(name="first")(dense(WIDTH, 1)(inputs))
    x = Adds(name="second")(dense(WIDTH, 2)(dense(WIDTH, 3, kernel_regularizer="l2")(x)))
    model = kind(inputs, dense(1, 4, None)(x))
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["mae"])
    return model


class Vector(keras.Model):
    """`compute_loss` returns a loss of each example; Keras differentiates their sum."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return ops.sum(ops.square(y - y_pred), -1)


class Features(keras.Model):
    """`compute_loss` returns a loss of each feature: as many as examples."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        return ops.mean(ops.square(y - y_pred), 0)


class Gathers(keras.Model):
    """A loss of what `ktrainer.all_gather` returns: in one process, what it is given. It counts
    metrics of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total = keras.metrics.Sum("total")
        self.size = keras.metrics.MeanAbsoluteError("size")

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        every = all_gather(y_pred)
        self.total.update_state(every)
        self.size.update_state(ops.zeros_like(every), every)
        return ops.mean(ops.square(every - ops.mean(every)))


def sums(kind: Any = keras.Model, loss: Any = None) -> keras.Model:
    inputs = keras.Input((6,))
    model = kind(inputs, dense(WIDTH, 4, None)(dense(8, 2)(dense(8, 1)(inputs))))
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


BUILD = {
    "simclr": simclr,
    "clip": clip,
    "masked": masked,
    "two_losses": two_losses,
    "adds": adds,
    "weighs": functools.partial(adds, Weighs, None),
    "leaves_out": functools.partial(adds, LeavesOut, None),
    "vector": functools.partial(sums, Vector),
    "features": functools.partial(sums, Features),
    "gathers": functools.partial(sums, Gathers),
    "unreduced": lambda: sums(loss=keras.losses.MeanSquaredError(reduction=None)),
}


def data_of(model: str, rows: int) -> Any:
    """(x, y), or with sample weights."""
    random = np.random.default_rng(0)
    if model == "simclr":
        return random.normal(size=(rows, 2, 6)), np.zeros((rows, 1))
    if model == "clip":
        views = (random.normal(size=(rows, 4)), random.normal(size=(rows, 3)))
        return views, np.zeros((rows, 1))
    if model == "masked":
        tokens = random.integers(0, 12, (rows, 5))
        return tokens, np.roll(tokens, -1, 1), random.random((rows, 5))
    x = random.normal(size=(rows, 6))
    targets = {"early": x[:, :1], "late": x[:, 1:3], "aside": x[:, 3:5]}
    return x, targets if model == "two_losses" else x[:, :1] + np.arange(WIDTH)


@dataclass(frozen=True)
class Fit:
    """One training: `batch` rows an update, validated with all the data."""

    model: str
    rows: int = 43
    batch: int = 20
    epochs: int = 2
    floatx: str = "float64"


@functools.cache
def one_process(fit: Fit) -> Outcome:
    """What `Model.fit` makes of it; once a session."""
    configure(fit.floatx)
    data, model = data_of(fit.model, fit.rows), BUILD[fit.model]()
    x, *targets = data
    given = dict(zip(("y", "sample_weight"), targets, strict=False))
    each = {"batch_size": fit.batch, "verbose": 0}
    history = model.fit(x, **given, **each, epochs=fit.epochs, shuffle=False, validation_data=data)
    variables = named(model)
    return Outcome(
        names=[name for name, _ in variables],
        held={name: v.numpy() for name, v in variables},
        history=history.history,
        evaluated=model.evaluate(x, **given, **each, return_dict=True),
        predicted=keras.tree.flatten(model.predict(x, **each)),
    )


def train(fit: Fit, words: tuple[str, ...]) -> Outcome:
    """The same on this rank of a Trainer."""
    from ktrainer import Trainer

    configure(fit.floatx)
    quiet = ("logging.progress=none", "logging.csv=false", "data.shuffle=false")
    more = (f"trainer.epochs={fit.epochs}", f"data.batch_size={fit.batch}", "world.deadline=60")
    data = data_of(fit.model, fit.rows)
    with Trainer(overrides=[*words, *more, *quiet]) as trainer:
        history = trainer.fit(BUILD[fit.model], data, validation_data=data)
        return outcome_of(trainer, history, data, Notes(), {})
