"""The models of `make_files.py` on Keras 3, and some that differ from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from keras import layers, ops, optimizers

BETAS = {"beta_1": 0.75, "beta_2": 1 - 2**-10}


def functional(
    optimizer: Any = None, *, width: int = 3, norm: bool = True, more: bool = False, deep: int = 0
) -> keras.Model:
    """`deep`: so many layers without weights after `right`, which change the order of layers."""
    inputs = keras.Input((4,))
    left = layers.Dense(3, "tanh")(inputs)
    right = layers.Dense(width, "tanh", name="right")(inputs)
    for _ in range(deep):
        right = layers.Activation("linear")(right)
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3), layers.Dense(3)])
    x = layers.Dropout(0.0)(layers.BatchNormalization(momentum=0.5)(left) if norm else left)
    x = layers.Concatenate()([inner(x), right])
    x = layers.Dense(6, name="more")(x) if more else x
    model = keras.Model(inputs, layers.Dense(1)(x), name="net")
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


class Subclassed(keras.Model):
    def __init__(self, embeds: bool = True) -> None:
        super().__init__()
        # In another order than in Keras 2.
        self.heads = {"scale": layers.Dense(1), "mean": layers.Dense(1)}
        self.both = layers.Bidirectional(layers.GRU(2))
        self.blocks = [layers.Dense(3, "tanh"), layers.Dense(3, "tanh")]
        self.stack = layers.RNN([layers.LSTMCell(2), layers.LSTMCell(3)])
        self.attention = layers.MultiHeadAttention(2, 4)
        self.depthwise = layers.DepthwiseConv1D(2, padding="same")
        self.norm = layers.LayerNormalization()
        self.embed = layers.Embedding(5, 3, trainable=embeds)
        self.tracker = keras.metrics.Mean(name="tracker")
        self.shift = self.add_weight(name="shift", shape=(3,), initializer="ones")

    def build(self, shape: Any) -> None:
        self.built = True

    def call(self, x: Any) -> Any:
        e = self.embed(ops.cast(ops.clip(ops.abs(x) * 2, 0, 4), "int32"))
        e = self.norm(self.attention(e, e))
        h = self.blocks[1](self.blocks[0](self.stack(e) + self.shift))
        more = ops.sum(self.depthwise(e), [1, 2])[:, None] + self.both(e)[:, :1]
        return self.heads["mean"](h) + self.heads["scale"](h) * more


def subclassed(optimizer: Any, embeds: bool = True) -> keras.Model:
    model = Subclassed(embeds)
    model(np.zeros((1, 4)))
    model.compile(optimizer, "mse")
    return model


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        self.discriminator = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        self.discriminator_optimizer = optimizers.Adam(0.01)
        self.generator_optimizer = optimizers.Adam(0.05)

    def call(self, x: Any) -> Any:
        return self.discriminator(self.generator(x))


def gan() -> keras.Model:
    model = Gan()
    model(np.zeros((1, 4)))
    return model


class Towers(keras.Model):
    """In another order than in Keras 2."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.user = tower(), tower()
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.user(x) * self.item(x + 1))


def tower() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(3, "tanh", name="hidden")(inputs))


def towers() -> keras.Model:
    model = Towers()
    model(np.zeros((1, 4)))
    model.compile(optimizers.Adam(0.05), "mse")
    return model


def recurrent() -> keras.Model:
    """Its layers are in another order than in Keras 2, by operations in between."""
    inputs = keras.Input((4,))
    x = layers.Reshape((2, 2))(layers.Normalization()(inputs))
    every = []
    for deep, name in enumerate("abcd"):
        inner = (
            layers.GRU(3, name=name)
            if deep < 2
            else layers.Bidirectional(layers.LSTM(2), name=name)
        )
        y = inner(x)
        for _ in range(deep):
            y = layers.Activation("linear")(y)
        every.append((deep + 1.0) * y)
    model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(every)))
    model.compile(optimizers.SGD(0.05), "mse")
    return model


def alike(names: tuple[str | None, ...] = (None, None, None)) -> keras.Model:
    """The second layer is made first."""
    inputs = keras.Input((4,))
    second, first = (layers.Dense(3, "tanh", name=name) for name in names[1::-1])
    a, b = first(inputs), second(inputs)
    model = keras.Model(inputs, layers.Dense(1, name=names[2])(a + 2 * b))
    model.compile(optimizers.SGD(0.05), "mse")
    return model


alike_named = partial(alike, ("dense", "dense_1", "dense_2"))


class Twice(keras.Model):
    """Two weights, by whose name one variable is found."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.add_weight(name="w", shape=(2,))
        self.b = self.add_weight(name="w", shape=(2,))
        self.built = True


def twice() -> keras.Model:
    return Twice()


def branches() -> keras.Model:
    inputs = keras.Input((4,)), keras.Input((4,))
    a, b, c, d = (layers.Dense(2, "tanh") for _ in range(4))
    x = layers.Concatenate()([d(inputs[1]), b(inputs[0]), a(inputs[1]), c(inputs[0])])
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def two_layers() -> keras.Model:
    """What a TensorFlow 2 module of two layers is on Keras 3."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])


adam = partial(functional, "adam")


def fast_adam() -> keras.Model:
    return functional(optimizers.Adam(0.05))


def other_betas() -> keras.Model:
    return functional(optimizers.Adam(0.05, **BETAS))


def sgd() -> keras.Model:
    return functional(optimizers.SGD(0.05, momentum=0.75))


def rmsprop() -> keras.Model:
    return functional(optimizers.RMSprop(0.01, momentum=0.5, centered=True))


def rmsprop_like_adam() -> keras.Model:
    """Its slots have the names of Adam's in Keras 3."""
    return functional(optimizers.RMSprop(0.01, momentum=0.5))


def scheduled() -> keras.Model:
    return functional(optimizers.Adam(optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)))


def subclassed_sgd() -> keras.Model:
    return subclassed(optimizers.SGD(0.05, momentum=0.9))


def subclassed_adam() -> keras.Model:
    return subclassed(optimizers.Adam(0.05, epsilon=2**-10, **BETAS), embeds=False)


wide = partial(functional, "adam", width=4)
without_norm = partial(functional, "adam", norm=False)
with_more = partial(functional, "adam", more=True)
other_order = partial(functional, "adam", deep=5)


def _of(optimizer: Any, **settings: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        start = [keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)]
        model = keras.Sequential(start)
        model.compile(optimizer(0.5, **settings), "mse")  # the rate is that of the file
        return model

    return make


_BETAS = {"beta_1": 0.75, "beta_2": 0.875}
adagrad, adadelta = _of(optimizers.Adagrad), _of(optimizers.Adadelta)
adamax, ftrl = _of(optimizers.Adamax), _of(optimizers.Ftrl)
nadam = _of(optimizers.Nadam)
adamw, lion = _of(optimizers.AdamW), _of(optimizers.Lion)
amsgrad = _of(optimizers.Adam, amsgrad=True)
average = _of(optimizers.SGD, momentum=0.75, use_ema=True)
legacy_adadelta = _of(optimizers.Adadelta, rho=0.875)
legacy_adamax = _of(optimizers.Adamax, **_BETAS)
legacy_ftrl = _of(optimizers.Ftrl)
legacy_amsgrad = _of(optimizers.Adam, amsgrad=True, **_BETAS)
accumulated_amsgrad = _of(optimizers.Adam, amsgrad=True, gradient_accumulation_steps=2)
accumulated_legacy_amsgrad = _of(
    optimizers.Adam, amsgrad=True, gradient_accumulation_steps=2, **_BETAS
)
legacy_rmsprop = _of(optimizers.RMSprop, rho=0.875, momentum=0.5, centered=True)
exponential = _of(
    lambda _: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.0625, 3, 0.5, staircase=True))
)
OTHERS = [
    "exponential",
    "adagrad",
    "adadelta",
    "adamax",
    "ftrl",
    "adamw",
    "lion",
    "amsgrad",
    "average",
    "legacy_adadelta",
    "legacy_adamax",
    "legacy_ftrl",
    "legacy_amsgrad",
    "legacy_rmsprop",
]
