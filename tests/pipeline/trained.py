"""Compiled models, one of each kind that a pipeline cuts, and data for them."""

from __future__ import annotations

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


def scoped() -> keras.Model:
    """Stages set in the code: the middle on stage 0, its ends on stage 1."""
    inputs = keras.Input((6,))
    with ktrainer.partition(0):
        x = layers.Dense(8, "tanh")(inputs)
    with ktrainer.partition(1):
        x = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(x))
        model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1, nesterov=True, momentum=0.5), classes())
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


_PLAIN = (mlp, plain, cnn, tied, masked, two, recurrent, scoped)
_SPECIAL = (aside, unused, rare, thrice, words, steep, steep_first)
BUILD: dict[str, Any] = {f.__name__: f for f in (*_PLAIN, *_SPECIAL)}


def data_of(model: str, rows: int = ROWS) -> tuple[Any, Any]:
    """(x, y) for a model, in the float type that is set."""
    random, floats = np.random.default_rng(0), keras.config.floatx()

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=(rows, *shape)).astype(floats)

    if model in ("tied", "masked", "recurrent"):
        tokens = random.integers(0, 12, (rows, 5))
        return tokens, tokens.sum(1) % 3 if model == "recurrent" else np.roll(tokens, -1, 1)
    if model == "words":
        tokens = random.integers(0, 7, (rows, 5))
        return np.array(list("abcdefg"))[tokens], tokens.sum(1) % 3
    if model == "two":
        return {"a": normal(4), "b": normal(3)}, {"early": normal(1), "late": normal(2)}
    x = normal(6, 6, 2) if model == "cnn" else normal(6)
    y = x.reshape(rows, -1)[:, :3].argmax(1)
    return x, {"main": y} if model in ("aside", "unused") else y
