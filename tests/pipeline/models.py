"""Models of every kind that a pipeline has to cut."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops


class Block(layers.Layer):
    """A pre-norm block of attention and a hidden layer, made of Keras layers and ops."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.LayerNormalization(name="norm")
        self.attention = layers.MultiHeadAttention(2, width // 2, name="attention")
        self.hidden = layers.Dense(width, name="hidden")

    def call(self, x: Any) -> Any:
        h = self.norm(x)
        x = x + self.attention(h, h)
        return x + ops.relu(self.hidden(x))


class Encoder(layers.Layer):
    """A layer made of layers that are made of layers."""

    def __init__(self, width: int, depth: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [Block(width, name=f"block_{i}") for i in range(depth)]
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return ops.multiply(x, self.scale)


class Tied(keras.Model):
    """A small language model whose output projection is its embedding."""

    def __init__(self, words: int = 20, width: int = 8, depth: int = 2) -> None:
        super().__init__(name="tied")
        self.embed = layers.Embedding(words, width, name="embed")
        self.encoder = Encoder(width, depth, name="encoder")
        self.drop = layers.Dropout(0.5, seed=1, name="drop")

    def call(self, tokens: Any, training: bool = False) -> Any:
        h = self.embed(tokens) + ops.cast(ops.arange(6), self.compute_dtype)[:, None]
        h = self.drop(self.encoder(h), training=training)
        return ops.matmul(h, ops.transpose(self.embed.embeddings))


def residual_cnn() -> keras.Model:
    """A functional CNN with batch normalisation and a skip over several layers."""
    inputs = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    skip = x
    for i in range(3):
        x = layers.Conv2D(4, 3, padding="same", name=f"conv_{i}")(x)
        x = layers.BatchNormalization(name=f"norm_{i}")(x)
        x = ops.relu(x)
    x = layers.Add(name="join")([x, skip])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(5, name="head")(x))


def two_in_two_out() -> keras.Model:
    """Two inputs and two outputs, both dicts; one output comes early."""
    left, right = keras.Input((4,), name="left"), keras.Input((6,), name="right")
    a = layers.Dense(8, name="a")(left)
    b = layers.Dense(8, name="b")(right)
    early = layers.Dense(1, name="early")(a)
    joined = layers.Concatenate(name="joined")([a, b])
    late = layers.Dense(3, name="late")(layers.Dense(8, name="c")(joined))
    return keras.Model({"left": left, "right": right}, {"early": early, "late": late})


def nested() -> keras.Model:
    """A functional model around a Sequential around a functional model."""
    inner_input = keras.Input((8,))
    inner = keras.Model(
        inner_input,
        inner_input + layers.Dense(8, name="first")(inner_input),
        name="inner",
    )
    middle = keras.Sequential([inner, layers.Dense(8, name="second")], name="middle")
    inputs = keras.Input((8,), name="x")
    return keras.Model(inputs, layers.Dense(2, name="last")(middle(inputs)))


def shared_layer() -> keras.Model:
    """One layer called three times."""
    inputs = keras.Input((4,), name="x")
    again = layers.Dense(4, name="again")
    x = layers.Dense(4, name="first")(again(inputs))
    return keras.Model(inputs, again(again(x)))
