"""Compiled models, one of each kind that a pipeline cuts, and data for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import ktrainer
from tests.pipeline.models import Block

ROWS = 338  # 16 batches of 20, and one of 18, whose microbatches have 5, 5, 4 and 4 rows


def classes() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mlp(deep: int = 8) -> keras.Model:
    """Dense layers, weights with a regulariser on the first, middle and last stage."""
    inner = [
        layers.Dense(8, "tanh", kernel_regularizer="l2" if i % 3 == 0 else None, name=f"d{i}")
        for i in range(deep)
    ]
    model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3, bias_regularizer="l1")])
    model.compile(keras.optimizers.AdamW(0.01), classes(), metrics=["accuracy"])
    return model


def unbuilt() -> keras.Model:
    """A Sequential that does not know its inputs, though its layers do. The gradient of silu, at
    the end of a stage, waits for the one that it is given."""
    inputs = keras.Input((6,))
    inner = keras.Model(inputs, layers.Dense(3)(layers.Dense(8, "silu")(inputs)))
    model = keras.Sequential([inner])
    model.compile(keras.optimizers.AdamW(0.01), classes(), metrics=["accuracy"])
    return model


def plain() -> keras.Model:
    """Nothing but dense layers and plain SGD."""
    inner = [layers.Dense(8, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), classes(), metrics=["accuracy"])
    return model


def cnn() -> keras.Model:
    """Convolutions with BatchNorm, a skip over stages, dropout."""
    inputs = keras.Input((6, 6, 2))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(inputs))
    skip = x = layers.Activation("softplus")(x)
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x))
    x = layers.Dropout(0.3)(layers.Add()([skip, x]))
    x = layers.Dropout(0.2)(layers.Dense(8, "tanh")(layers.GlobalAveragePooling2D()(x)))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), classes(), metrics=["accuracy"])
    return model


class TiedModel(keras.Model):
    """A causal transformer with masks, dropout, and an embedding that is its last layer too."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.embed = layers.Embedding(12, 8, mask_zero=True, name="embed")
        self.attend = layers.MultiHeadAttention(2, 4, name="attend")
        self.norm = layers.LayerNormalization(name="norm")
        self.hidden = layers.Dense(8, "softplus", name="hidden")
        self.drop = layers.Dropout(rate)

    def call(self, tokens: Any, training: bool = False) -> Any:
        h = self.embed(tokens)
        h = self.norm(h + self.attend(h, h, use_causal_mask=True))
        h = self.drop(h + self.hidden(h), training=training)
        return ops.matmul(h, ops.transpose(self.embed.embeddings))


def tied(rate: float = 0.2) -> keras.Model:
    model = TiedModel(rate)
    model.compile(keras.optimizers.Adam(0.01), classes(), weighted_metrics=["accuracy"])
    return model


def masked() -> keras.Model:
    """The same without dropout, which copies of a model draw differently."""
    return tied(0.0)


def two() -> keras.Model:
    """Two inputs, two outputs of which one comes early, losses of layers, clipping by norm."""
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    left = layers.Dense(8, "tanh", activity_regularizer="l2")(a)
    right = layers.Dense(8, "tanh", kernel_regularizer="l2")(b)
    both = layers.Dense(8, "tanh")(layers.Concatenate()([left, right]))
    outputs = {
        "early": layers.Dense(1, name="early")(left),
        "late": layers.Dense(2, name="late")(layers.Dense(8, "tanh")(both)),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        keras.optimizers.SGD(0.05, global_clipnorm=0.5),
        {"early": "mse", "late": "mae"},
        loss_weights={"early": 0.3, "late": 1.0},
        metrics={"early": ["mae"], "late": ["mse"]},
    )
    return model


class Recurrent(keras.Model):
    """Loops in the graph, a layer that is called twice, blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(12, 8, name="embed")
        self.read = layers.GRU(8, return_sequences=True, name="read")
        self.blocks = [Block(8, name=f"block_{i}") for i in range(2)]
        self.again = layers.Dense(8, "tanh", name="again")
        self.head = layers.Dense(3, name="head")

    def call(self, tokens: Any) -> Any:
        h = self.again(self.read(self.embed(tokens)))
        for block in self.blocks:
            h = block(h)
        return self.head(ops.mean(self.again(h), axis=1))


def recurrent() -> keras.Model:
    model = Recurrent()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), classes(), metrics=["accuracy"])
    return model


def aside() -> keras.Model:
    """Of two outputs one has a loss, so that the weights of stage 2 have no gradients, and the
    first stage of three has no weights."""
    inputs = keras.Input((6,))
    with ktrainer.partition(0):
        scaled = layers.Rescaling(0.5)(inputs)
    with ktrainer.partition(1):
        x = layers.Dense(8, "tanh")(scaled)
        main = layers.Dense(3, name="main")(x)
    with ktrainer.partition(2):
        model = keras.Model(inputs, {"main": main, "aside": layers.Dense(2, name="aside")(x)})
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), {"main": classes()})
    return model


def unused() -> keras.Model:
    """An output without a loss leaves the first of three stages: its weights must not decay."""
    inputs = keras.Input((6,))
    with ktrainer.partition(0):
        x = layers.Dense(8, "tanh")(inputs)
        early = layers.Dense(2, name="early")(layers.Dense(4, "tanh")(x))
    with ktrainer.partition(1):
        x = layers.Dense(8, "tanh")(x)
    with ktrainer.partition(2):
        model = keras.Model(inputs, {"main": layers.Dense(3, name="main")(x), "early": early})
    model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), {"main": classes()})
    return model


class Bend(layers.Layer):
    """The identity, through which no gradient of a norm above 0.02 comes back."""

    def call(self, x: Any) -> Any:
        @ops.custom_gradient
        def bend(x: Any) -> Any:
            return x * 1, lambda upstream: tf.clip_by_norm(upstream, 0.02)

        return bend(x)


class Rare(keras.Model):
    """Gradients that are clipped on their way back, a layer that is frozen, and weights that are
    regularised, though no output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [layers.Dense(8, "tanh", name=f"inner_{i}") for i in range(4)]
        self.inner[1].trainable = False
        self.bends = [Bend(name=f"bend_{i}") for i in range(2)]
        self.head = layers.Dense(3, name="head")
        self.spare = layers.Dense(2, kernel_regularizer="l2", name="spare")
        self.spare.build((None, 4))

    def call(self, x: Any) -> Any:
        for i, layer in enumerate(self.inner):
            x = layer(x)
            if i % 2 == 1:
                x = self.bends[i // 2](x)
        return self.head(x)


def rare() -> keras.Model:
    model = Rare()
    model.compile(keras.optimizers.SGD(0.5), classes(), metrics=["accuracy"])
    return model


class Effects(layers.Layer):
    """Made of another layer; counts its calls, and adds a loss of its weights and to a metric."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = layers.Dense(3, name="inner")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.seen = keras.metrics.Mean("seen")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        self.seen.update_state(self.calls)
        outputs = self.inner(x) / (1.0 + self.calls)
        self.add_loss(0.1 * ops.sum(ops.square(self.inner.kernel)))
        return outputs


class Aux(keras.Model):
    """Layers of which only the side effects count, on each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [layers.Dense(8, "tanh", name=f"hidden_{i}") for i in range(4)]
        self.penalty = layers.ActivityRegularization(l2=0.1, name="penalty")
        self.statistics = layers.BatchNormalization(momentum=0.5, name="statistics")
        self.probe = layers.Dense(2, activity_regularizer="l2", name="probe")
        self.idle = layers.Dense(2, name="idle")
        self.head = Effects(name="effects")

    def call(self, x: Any) -> Any:
        for i, layer in enumerate(self.hidden):
            x = layer(x)
            if i == 0:
                self.penalty(x)
                self.statistics(ops.sin(x))
        self.probe(x)
        self.idle(x)
        return self.head(x)


def aux() -> keras.Model:
    model = Aux()
    model.compile(keras.optimizers.SGD(0.1, weight_decay=0.1), classes(), metrics=["accuracy"])
    return model


class Steep(layers.Layer):
    """The identity, with a weight whose own gradient is so large that float16 overflows."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(1,), initializer="zeros", name="weight")

    def call(self, x: Any) -> Any:
        return x + self.weight * (ops.stop_gradient(ops.tanh(x)) * 1000)


def steep(at: int = 3) -> keras.Model:
    """Only the last stage's gradients overflow, until the loss scale is small enough."""
    inner = [layers.Dense(8, "tanh") for _ in range(3)]
    inner.insert(at, Steep(name="steep"))
    model = keras.Sequential([keras.Input((6,)), *inner, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(1e-6), classes(), metrics=["accuracy"])
    return model


def steep_first() -> keras.Model:
    """Only the first stage's do."""
    return steep(0)


def thrice() -> keras.Model:
    """One layer on each of three stages."""
    again = layers.Dense(6, "tanh", name="again")
    x = inputs = keras.Input((6,))
    for stage in range(3):
        with ktrainer.partition(stage):
            x = layers.Dense(6, "tanh")(again(x))
    with ktrainer.partition(2):
        model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.02), classes())
    return model


def words() -> keras.Model:
    """Strings that are looked up inside, and models within models."""
    inputs = keras.Input((5,), dtype="string")
    numbers = layers.StringLookup(vocabulary=list("abcdef"), name="look")(inputs)
    x = layers.Embedding(7, 8, name="embed")(numbers)
    inner = keras.Input((8,))
    block = keras.Model(inner, inner + layers.Dense(8, "tanh")(inner), name="inner")
    outer = keras.Sequential([block, layers.Dense(8, "tanh")], name="outer")
    x = outer(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, clipnorm=0.02), classes(), metrics=["accuracy"])
    return model


class Spectrum(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.signal.fft(tf.complex(x, ops.flip(x, -1)))


class Filter(layers.Layer):
    """Turns and weighs frequencies, then returns to real numbers."""

    def build(self, shape: Any) -> None:
        self.turn, self.scale = (self.add_weight((shape[-1],), "ones", name=n) for n in "ts")

    def call(self, z: Any) -> Any:
        weights = tf.complex(self.scale * tf.cos(self.turn), self.scale * tf.sin(self.turn))
        return tf.math.real(tf.signal.ifft(z * weights))


def spectral() -> keras.Model:
    """Complex numbers between two stages, beside a skip."""
    inputs = keras.Input((6,))
    with ktrainer.partition(0):
        x = layers.Dense(8, "tanh")(inputs)
        z = Spectrum()(x)
    with ktrainer.partition(1):
        model = keras.Model(inputs, layers.Dense(3)(layers.Add()([x, Filter()(z)])))
    model.compile(keras.optimizers.Adam(0.01), classes(), metrics=["accuracy"])
    return model


# -- losses of whole batches


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


def with_loss(compute: Callable[[Any, Any, Any], Any], base: Any = keras.Model) -> Any:
    """A kind of model whose loss is `compute(model, targets, outputs)`."""

    class WithLoss(base):
        def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return compute(self, y, y_pred)

    return WithLoss


def of_pairs(model: keras.Model, _: Any, towers: Any) -> Any:
    """CLIP's loss, of all pairs of the outputs of two towers."""
    image, text = map(normalised, towers)
    logits = ops.matmul(image, ops.transpose(text)) * 4.0
    right = ops.arange(ops.shape(logits)[0])
    of = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
    loss = ops.mean(of(right, logits) + of(right, ops.transpose(logits))) / 2
    return loss + sum(model.losses)


def clip() -> keras.Model:
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    image = dense(4, 3, None, name="image")(dense(8, 1, kernel_regularizer="l2")(a))
    text = dense(4, 4, None, name="text")(dense(8, 2)(b))
    model = with_loss(of_pairs)([a, b], [image, text])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def weighted_tokens() -> keras.Model:
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


def weighing(factor: float) -> Any:
    """A loss that weighs the losses that layers add, or drops them."""

    def compute(model: keras.Model, y: Any, y_pred: Any) -> Any:
        added = sum(ops.sum(loss) for loss in model.losses) if factor else 0.0
        return ops.mean(ops.square(y - y_pred)) + factor * added

    return with_loss(compute)


def adds(kind: Any = keras.Model, loss: Any = "mse") -> keras.Model:
    """Layers on every stage that add vectors, which Keras sums."""
    inputs = keras.Input((6,))
    x = Adds(name="first")(dense(WIDTH, 1)(inputs))
    x = Adds(name="second")(dense(WIDTH, 2)(dense(WIDTH, 3, kernel_regularizer="l2")(x)))
    model = kind(inputs, dense(1, 4, None)(x))
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["mae"])
    return model


class Counting(keras.Model):
    """Counts metrics of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total = keras.metrics.Sum("total")
        self.size = keras.metrics.MeanAbsoluteError("size")


def of_gathered(model: Any, _: Any, outputs: Any) -> Any:
    """A loss of what `ktrainer.all_gather` returns: in one process, what it is given."""
    every = ktrainer.all_gather(outputs)
    model.total.update_state(every)
    model.size.update_state(ops.zeros_like(every), every)
    return ops.mean(ops.square(every - ops.mean(every)))


def sums(kind: Any = keras.Model, loss: Any = None) -> keras.Model:
    inputs = keras.Input((6,))
    model = kind(inputs, dense(WIDTH, 4, None)(dense(8, 2)(dense(8, 1)(inputs))))
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


_PLAIN = (mlp, plain, unbuilt, cnn, tied, masked, two, recurrent)
_SPECIAL = (aside, unused, rare, aux, thrice, words, steep, steep_first, spectral)
_WHOLE = (simclr, clip, weighted_tokens, two_losses, adds)
BUILD: dict[str, Any] = {f.__name__: f for f in (*_PLAIN, *_SPECIAL, *_WHOLE)} | {
    "weighs": lambda: adds(weighing(0.3), None),
    "leaves_out": lambda: adds(weighing(0.0), None),
    # A loss of each example, whose sum Keras differentiates; one of each feature, as many.
    "vector": lambda: sums(with_loss(lambda _, y, z: ops.sum(ops.square(y - z), -1))),
    "features": lambda: sums(with_loss(lambda _, y, z: ops.mean(ops.square(y - z), 0))),
    "gathers": lambda: sums(with_loss(of_gathered, Counting)),
    "unreduced": lambda: sums(loss=keras.losses.MeanSquaredError(reduction=None)),
}


def data_of(model: str, rows: int = ROWS) -> tuple[Any, ...]:
    """(x, y), or (x, y, sample weights), for a model, in the float type that is set."""
    random, floats = np.random.default_rng(0), keras.config.floatx()

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=(rows, *shape)).astype(floats)

    if model == "simclr":
        return normal(2, 6), np.zeros((rows, 1))
    if model == "clip":
        return (normal(4), normal(3)), np.zeros((rows, 1))
    if model in ("tied", "masked", "recurrent", "weighted_tokens"):
        tokens = random.integers(0, 12, (rows, 5))
        y = tokens.sum(1) % 3 if model == "recurrent" else np.roll(tokens, -1, 1)
        return (tokens, y, random.random((rows, 5))) if model == "weighted_tokens" else (tokens, y)
    if model == "words":
        tokens = random.integers(0, 7, (rows, 5))
        return np.array(list("abcdefg"))[tokens], tokens.sum(1) % 3
    if model == "two":
        return {"a": normal(4), "b": normal(3)}, {"early": normal(1), "late": normal(2)}
    x = normal(6, 6, 2) if model == "cnn" else normal(6)
    y = x.reshape(rows, -1)[:, :3].argmax(1)
    if model == "two_losses":
        return x, {"early": x[:, :1], "late": x[:, 1:3], "aside": x[:, 3:5]}
    if model in {f.__name__ for f in _PLAIN + _SPECIAL}:
        return x, {"main": y} if model in ("aside", "unused") else y
    return x, x[:, :1] + np.arange(WIDTH)
