"""Trainings whose loss is a sum over examples, or couples them: what several ranks get wrong.

41 examples in batches of 16 leave a last batch of 9, which neither two nor three ranks divide.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import ktrainer
from tests.dist.cases import Case, Outcome, train
from tests.dist.harness import keras_state, leaks

SMALL = {"data.batch_size": 16, "trainer.epochs": 2}
WHOLE = {**SMALL, "trainer.loss_scope": "global"}


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(41, 8))
    return x, x[:, :3] @ random.normal(size=(3, 3))


def case(build: Any, settings: dict[str, Any], x: Any = None, y: Any = None, *more: Any) -> Case:
    default_x, default_y = data()
    x, y = default_x if x is None else x, default_y if y is None else y
    return Case(build, (x, y, *more), validation=(x, y, *more), settings=settings)


class Penalties(keras.layers.Layer):
    """Adds a loss of each example, one of each feature, and a scalar."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(x**2, axis=-1))
        self.add_loss(0.1 * ops.mean(x**2, axis=0)[: x.shape[-1]])
        self.add_loss(0.1 * ops.mean(x))
        return x


class Recomputed(keras.layers.Dense):
    """TensorFlow differentiates its outputs, a row for each example, under a tape of its own."""

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(super().call)(x)


def network(cls: Any = keras.Model, middle: Any = None, first: Any = Recomputed) -> Any:
    inputs = keras.Input((8,))
    hidden = first(6, activation="tanh", kernel_regularizer="l2")(inputs)
    hidden = hidden if middle is None else middle(hidden)
    return cls(inputs, keras.layers.Dense(3)(hidden))


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def added(**settings: Any) -> Case:
    def build() -> Any:
        model = network(middle=Penalties())
        model.compile(sgd(), "mse")
        return model

    return case(build, {**SMALL, **settings})


class OfSome(keras.Model):
    """A loss of those rows that the data choose, of which ranks have different numbers."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        chosen = y[:, 0] > 0.5
        of_some = keras.losses.MeanSquaredError()(y[chosen], y_pred[chosen])
        return of_some + 0.1 * keras.losses.MeanAbsoluteError()(y, y_pred)


def of_some(**settings: Any) -> Case:
    def build() -> Any:
        model = network(OfSome)
        model.compile(sgd())
        return model

    return case(build, {**SMALL, **settings})


class OfAny(keras.Model):
    """A loss of rows that the data choose, if there are any."""

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        chosen = x[:, 0] > 0
        loss = keras.losses.MeanSquaredError()
        of_any = tf.cond(
            tf.reduce_any(chosen),
            lambda: loss(y[chosen], y_pred[chosen]),
            lambda: tf.zeros([], y_pred.dtype),
        )
        return of_any + loss(y, y_pred)


def of_any(eagerly: bool = False) -> Case:
    """Of two ranks the second one has no such rows."""

    def build() -> Any:
        model = network(OfAny)
        model.compile(sgd(), run_eagerly=eagerly)
        return model

    x, y = data()
    x[:8, 0], x[8:, 0] = 1, -1
    return case(build, {"data.batch_size": 16, "data.shuffle": False}, x[:16], y[:16])


class Returns(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return keras.losses.mean_squared_error(y, y_pred)


def returned(**settings: Any) -> Case:
    def build() -> Any:
        model = network(Returns)
        model.compile(keras.optimizers.LossScaleOptimizer(sgd()))
        return model

    return case(build, {**SMALL, **settings})


class Differentiates(keras.Model):
    """Several targets under a persistent tape, and a gradient with respect to inputs in one."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        x = tf.convert_to_tensor(x)
        with tf.GradientTape(persistent=True) as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            slope = inner.gradient(outputs, x)
            losses = keras.losses.mean_squared_error(y, outputs)
            targets = [losses, 0.1 * tf.reduce_mean(slope**2), *self.losses]
        weights = self.trainable_variables
        given = [2 * tf.ones_like(losses), *map(tf.ones_like, targets[1:])]
        self.optimizer.apply(tape.gradient(targets, weights, output_gradients=given), weights)
        self._loss_tracker.update_state(losses)
        return {"loss": self._loss_tracker.result()}


def differentiated(eagerly: bool = False, **settings: Any) -> Case:
    def build() -> Any:
        model = network(Differentiates, Penalties(), keras.layers.Dense)
        model.compile(sgd(), "mse", run_eagerly=eagerly)
        return model

    return case(build, {**SMALL, **settings})


class Reversed(keras.layers.Dense):
    """Its gradient function differentiates its outputs, a row for each example, once more."""

    def call(self, x: Any) -> Any:
        original = super().call

        @tf.custom_gradient
        def outputs(x: Any) -> Any:
            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    again = original(x)
                given = {"output_gradients": dy}
                of_x, *of_variables = tape.gradient(again, [x, *variables], **given)
                return of_x, of_variables

            return original(x), gradient

        return outputs(x)


class InPieces(keras.Model):
    """Differentiates its loss by what its first layer gives, then that by its weights."""

    reduces = True

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        _, first, last = self.layers
        with tf.GradientTape() as of_first:
            hidden = first(x)
        with tf.GradientTape(persistent=True) as of_last:
            of_last.watch(hidden)
            loss = keras.losses.mean_squared_error(y, last(hidden))
            loss = tf.reduce_mean(loss) if self.reduces else loss
            # Of a rank that is not known while the step is traced, as of tf.py_function.
            scalar = tf.compat.v1.placeholder_with_default(tf.reduce_mean(hidden**2), None)
            loss += scalar if self.reduces else 0 * scalar
            known = tf.reshape(loss, [] if self.reduces else [-1])
        given = of_last.gradient(known, hidden)
        found = [
            *of_first.gradient(hidden, first.trainable_variables, output_gradients=2 * given),
            *of_last.gradient(loss, last.trainable_variables),
        ]
        self.optimizer.apply(found, [*first.trainable_variables, *last.trainable_variables])
        self._loss_tracker.update_state(known)
        return {"loss": self._loss_tracker.result()}


class InPiecesOfRows(InPieces):
    """With a loss of each example."""

    reduces = False


def in_pieces(cls: Any = InPieces, first: Any = keras.layers.Dense, **settings: Any) -> Case:
    def build() -> Any:
        model = network(cls, first=first)
        model.compile(sgd(), "mse")
        return model

    return case(build, {**SMALL, **settings})


def nt_xent(_: Any, views: Any) -> Any:
    """SimCLR's loss of each pair of views, which has shape (examples, 2, features)."""
    z = ops.normalize(ops.concatenate([views[:, 0], views[:, 1]], 0), axis=-1)
    n = ops.shape(views)[0]
    alike = ops.matmul(z, ops.transpose(z)) / 0.5 - 1e9 * ops.eye(2 * n, dtype=z.dtype)
    partner = ops.concatenate([ops.arange(n, 2 * n), ops.arange(n)], 0)
    each = keras.losses.sparse_categorical_crossentropy(partner, alike, from_logits=True)
    return ops.mean(ops.reshape(each, (2, n)), 0)


def simclr(scope: str = "global", **settings: Any) -> Case:
    def build() -> Any:
        views = keras.Input((2, 8))
        z = keras.layers.Dense(4)(keras.layers.Dense(6, activation="tanh")(views))
        model = keras.Model(views, z)
        model.compile(sgd(), nt_xent)
        return model

    x = np.stack([data()[0], data()[0] + np.random.default_rng(1).normal(size=(41, 8))], 1)
    return case(build, {**SMALL, "trainer.loss_scope": scope, **settings}, x)


def doubled() -> Case:
    """A model with two rows for each example, whose order would be another."""

    def build() -> Any:
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(2)(inputs)
        model = keras.Model(inputs, ops.concatenate([outputs, outputs], 0))
        model.compile(sgd(), lambda y, z: ops.mean(z))
        return model

    return case(build, WHOLE)


def clip_loss(image: Any, text: Any) -> Any:
    logits = ops.matmul(image, ops.transpose(text))
    labels = ops.arange(ops.shape(image)[0])
    both = [
        keras.losses.sparse_categorical_crossentropy(labels, each, from_logits=True)
        for each in (logits, ops.transpose(logits))
    ]
    return ops.mean(both[0] + both[1]) / 2


class Clip(keras.Model):
    """CLIP's loss, with random numbers in it, of two outputs and of the inputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def compute_loss(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
    ) -> Any:
        warmth = keras.random.uniform((), 1, 2, seed=self.seeds)
        loss = clip_loss(warmth * y_pred["image"], y_pred["text"])
        spread = ops.mean(ops.matmul(x["text"], ops.transpose(y_pred["image"] @ np.ones((4, 5)))))
        return loss + 0.01 * spread + sum(ops.sum(each) for each in self.losses)


def two_towers(cls: Any) -> Any:
    inputs = {"image": keras.Input((8,), name="image"), "text": keras.Input((5,), name="text")}
    image = keras.layers.Dense(4, kernel_regularizer="l2")(inputs["image"])
    return cls(inputs, {"image": image, "text": keras.layers.Dense(4)(inputs["text"])})


def clip(cls: Any = Clip, **settings: Any) -> Case:
    def build() -> Any:
        model = two_towers(cls)
        model.compile(sgd())
        return model

    x = {"image": data()[0], "text": np.random.default_rng(2).normal(size=(41, 5))}
    return case(build, {**WHOLE, **settings}, x)


class OfRows(keras.losses.Loss):
    """One value for each row, which weights of each feature spread over all of them."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean((y_true - y_pred) ** 2, axis=-1, keepdims=True)


def spread(**settings: Any) -> Case:
    def build() -> Any:
        model = network()
        model.compile(sgd(), OfRows())
        return model

    weights = np.random.default_rng(1).uniform(0.5, 1.5, size=(41, 3))
    return case(build, {**SMALL, **settings}, None, None, weights)


def pairwise(y: Any, scores: Any) -> Any:
    """A hinge loss of every pair, for each example."""
    sign = ops.sign(y - ops.transpose(y))
    return ops.mean(ops.maximum(0.0, 1.0 - sign * (scores - ops.transpose(scores))), -1)


def ranking(**settings: Any) -> Case:
    """Beside a masked loss of another output, both weighted."""

    def build() -> Any:
        tokens = keras.Input((5,))
        embedded = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
        words = keras.layers.Dense(9, name="words")(embedded)
        score = keras.layers.Dense(1, name="score")(keras.layers.GlobalAveragePooling1D()(embedded))
        model = keras.Model(tokens, [score, words])
        next_word = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            sgd(), [pairwise, next_word], loss_weights=[1.0, 0.5], metrics=[["mae"], ["accuracy"]]
        )
        return model

    random = np.random.default_rng(3)
    x = random.integers(1, 9, (41, 5))
    x[np.arange(5)[None] >= random.integers(1, 6, (41, 1))] = 0
    y = (random.normal(size=(41, 1)), np.roll(x, -1, 1))
    return case(build, {**WHOLE, **settings}, x, y, (random.random(41), random.random((41, 5))))


class GatheringClip(keras.Model):
    """CLIP's loss of all ranks' rows, the same on all, in a step of its own."""

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            image, text = (ktrainer.all_gather(outputs[key]) for key in ("image", "text"))
            loss = clip_loss(image, text) + sum(self.losses)
        return self.step(tape, loss)

    def step(self, tape: Any, loss: Any) -> Any:
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result()}

    def test_step(self, batch: Any) -> Any:
        outputs = self(batch[0], training=False)
        image, text = (ktrainer.all_gather(outputs[key]) for key in ("image", "text"))
        self._loss_tracker.update_state(clip_loss(image, text))
        return {"loss": self._loss_tracker.result()}


class OwnAgainstAll(GatheringClip):
    """Each rank's loss of its own rows against all rows, with labels gathered exactly."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            kinds, used = y[:, 0] > 0, ops.cast(10 * y[:, 1], "int32")
            every = ktrainer.all_gather(outputs["text"])
            alike = (kinds[:, None] == ktrainer.all_gather(kinds)[None]) & (
                used[:, None] >= ktrainer.all_gather(used)[None]
            )
            logits = ops.matmul(outputs["image"], ops.transpose(every))
            each = ops.logsumexp(logits, -1) - ops.mean(ops.where(alike, logits, 0), -1)
            loss = ops.mean(each)
        return self.step(tape, loss)


class SumsOfGathered(GatheringClip):
    """Keras' losses of gathered rows, by each reduction, and a vector of them."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        mse = keras.losses.MeanSquaredError
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            image, text = (ktrainer.all_gather(outputs[key]) for key in ("image", "text"))
            weights = ktrainer.all_gather(y[:, 0] ** 2)
            scalar = mse()(image, text, weights)
            scalar += 0.1 * mse(reduction="sum")(image, text)
            scalar += mse(reduction="mean_with_sample_weight")(image, text, weights)
            scalar += 0.1 * mse(reduction="sum")(outputs["image"], outputs["text"])
            each = 0.1 * keras.losses.mean_absolute_error(image, text)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient([scalar, each], weights), weights)
        self._loss_tracker.update_state(each)
        return {"loss": self._loss_tracker.result()}


def gathering(cls: Any = GatheringClip, **settings: Any) -> Case:
    return clip(cls, **{"trainer.loss_scope": "local", **settings})


FEWER = {"data.batch_size": 2}  # three ranks: some have no rows
HALVES = {"data.batch_size": 8, "trainer.accumulate": 2}
LOSSES = {
    "added": lambda: added(),
    "added_accumulated": lambda: added(**HALVES),
    "of_some": lambda: of_some(),
    "spread": lambda: spread(),
    "spread_accumulated": lambda: spread(**HALVES),
    "of_any": lambda: of_any(),
    "of_any_eagerly": lambda: of_any(eagerly=True),
    "of_some_accumulated": lambda: of_some(**HALVES),
    "returned_whole": lambda: returned(**WHOLE),
    "returned_accumulated": lambda: returned(**HALVES),
    "differentiated": lambda: differentiated(),
    "in_pieces": lambda: in_pieces(),
    "in_pieces_accumulated": lambda: in_pieces(**HALVES),
    "in_pieces_of_rows": lambda: in_pieces(InPiecesOfRows),
    "reversed": lambda: in_pieces(first=Reversed),
    "differentiated_eagerly": lambda: differentiated(True),
    "differentiated_in_few_rows": lambda: differentiated(**FEWER),
    "differentiated_by_xla": lambda: differentiated(**{"trainer.xla": "true"}),
    "simclr": lambda: simclr(),
    "simclr_in_few_rows": lambda: simclr(**FEWER),
    "clip": lambda: clip(),
    "ranking": lambda: ranking(),
    "gathering_clip": lambda: gathering(),
    "own_against_all": lambda: gathering(OwnAgainstAll),
    "own_against_all_in_few_rows": lambda: gathering(OwnAgainstAll, **FEWER),
    "sums_of_gathered_accumulated": lambda: gathering(SumsOfGathered, **HALVES),
}


def outcomes(names: list[str], **settings: Any) -> list[Outcome]:
    """Train some of the cases above; `settings` as for `train`."""
    from tests.tf_distribute.running import make_devices

    found = []
    for name in names:
        if settings["backend"] == "tf_distribute":
            make_devices()
        found.append(train(LOSSES[name](), **settings))
        keras_state.clear()
    if settings.get("backend__strategy") == "multi_worker_mirrored":
        leaks.expect_ports()
    return found
