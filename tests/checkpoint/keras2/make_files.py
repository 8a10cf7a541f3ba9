"""Write the checkpoints in this folder with Keras 2, and what Keras 2 gets when it continues.

Run once, in an environment with `tf_keras` (2.21) beside TensorFlow:

    TF_USE_LEGACY_KERAS=1 python make_files.py

Each NAME-1 is a `tf.train.Checkpoint` after 4 updates; NAME.npz what the model says of the
data then, and after 4 more updates.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras as keras  # type: ignore[import-not-found]

HERE = Path(__file__).parent
STEPS, BATCH = 4, 6


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(STEPS * BATCH, 4)), random.normal(size=(STEPS * BATCH, 1))


def functional() -> keras.Model:
    """A branch of each kind, whose first layers are alike in shape."""
    inputs = keras.Input((4,))
    left = keras.layers.Dense(3, "tanh")(inputs)
    right = keras.layers.Dense(3, "tanh", name="right")(inputs)
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    x = keras.layers.Dropout(0.0)(keras.layers.BatchNormalization(momentum=0.5)(left))
    x = keras.layers.Concatenate()([inner(x), right])
    return keras.Model(inputs, keras.layers.Dense(1)(x), name="net")


class Subclassed(keras.Model):
    def __init__(self, embeds: bool = True) -> None:
        super().__init__()
        # Adam of Keras 3 squares the gradient of each lookup, that of Keras 2 their sum.
        self.embed = keras.layers.Embedding(5, 3, trainable=embeds)
        self.blocks = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(3, "tanh")]
        self.heads = {"mean": keras.layers.Dense(1), "scale": keras.layers.Dense(1)}
        self.both = keras.layers.Bidirectional(keras.layers.GRU(2))
        self.stack = keras.layers.RNN([keras.layers.LSTMCell(2), keras.layers.LSTMCell(3)])
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.depthwise = keras.layers.DepthwiseConv1D(2, padding="same")
        self.norm = keras.layers.LayerNormalization()
        self.tracker = keras.metrics.Mean(name="tracker")
        self.shift = self.add_weight("shift", (3,), initializer="ones")

    def call(self, x: Any) -> Any:
        e = self.embed(tf.cast(tf.clip_by_value(tf.abs(x) * 2, 0, 4), tf.int32))
        e = self.norm(self.attention(e, e))
        h = self.blocks[1](self.blocks[0](self.stack(e) + self.shift))
        more = tf.reduce_sum(self.depthwise(e), [1, 2])[:, None] + self.both(e)[:, :1]
        return self.heads["mean"](h) + self.heads["scale"](h) * more


def train(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """As a Horovod script does: a loop of its own."""
    x, y = data()
    loss = keras.losses.MeanSquaredError()

    @tf.function
    def step(a: Any, b: Any) -> None:
        with tf.GradientTape() as tape:
            value = loss(b, model(a, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for k in range(0, STEPS * BATCH, BATCH):
        step(tf.constant(x[k : k + BATCH]), tf.constant(y[k : k + BATCH]))


def keep(name: str, make: Any, optimizer: Any, **others: Any) -> None:
    tf.random.set_seed(0)
    keras.backend.clear_session()
    model, x = make(), data()[0]
    train(model, optimizer)
    tf.train.Checkpoint(model=model, optimizer=optimizer, **others).save(str(HERE / name))
    saved = model(x).numpy()
    train(model, optimizer)
    np.savez(HERE / f"{name}.npz", saved=saved, continued=model(x).numpy())


def main() -> None:
    legacy = keras.optimizers.legacy
    keras.backend.set_floatx("float64")
    # Keras 2 keeps hyperparameters in single precision: numbers that are the same in double.
    betas = {"beta_1": 0.75, "beta_2": 1 - 2**-10}
    keep("adam", functional, keras.optimizers.Adam(0.05), epoch=tf.Variable(7))
    keep("legacy_adam", functional, legacy.Adam(0.0625, **betas))
    keep("legacy_sgd", functional, legacy.SGD(0.0625, momentum=0.75))
    keep("rmsprop", functional, keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True))
    keep("subclassed", Subclassed, keras.optimizers.SGD(0.005, momentum=0.9))
    # The gradient of an attention's key bias is rounding alone, which a small epsilon amplifies.
    optimizer = legacy.Adam(0.0625, epsilon=2**-10, **betas)
    keep("legacy_subclassed", lambda: Subclassed(False), optimizer)
    keep("towers", Towers, keras.optimizers.Adam(0.05))
    keep("optimizer_nadam", two_layers, keras.optimizers.Nadam(0.0625))
    keep("recurrent", recurrent, keras.optimizers.SGD(0.05))
    keep("alike", alike, keras.optimizers.SGD(0.05))
    gan()
    other_optimizers()
    branches()
    os.remove(HERE / "checkpoint")
    of_fit()


def other_optimizers() -> None:
    new, legacy = keras.optimizers, keras.optimizers.legacy
    betas = {"beta_1": 0.75, "beta_2": 0.875}
    for name, optimizer in {
        "adagrad": new.Adagrad(0.0625),
        "adadelta": new.Adadelta(0.0625),
        "adamax": new.Adamax(0.0625),
        "ftrl": new.Ftrl(0.0625),
        "adamw": new.AdamW(0.0625),
        "lion": new.Lion(0.0625),
        "amsgrad": new.Adam(0.0625, amsgrad=True),
        "exponential": new.Adam(new.schedules.ExponentialDecay(0.0625, 3, 0.5, staircase=True)),
        "average": new.SGD(0.0625, momentum=0.75, use_ema=True),
        "legacy_adadelta": legacy.Adadelta(0.0625, rho=0.875),
        "legacy_adamax": legacy.Adamax(0.0625, **betas),
        "legacy_ftrl": legacy.Ftrl(0.0625),
        "legacy_amsgrad": legacy.Adam(0.0625, amsgrad=True, **betas),
        "legacy_rmsprop": legacy.RMSprop(0.0625, rho=0.875, momentum=0.5, centered=True),
    }.items():
        keep(f"optimizer_{name}", two_layers, optimizer)


def two_layers() -> keras.Model:
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def branches() -> None:
    """Layers without names, alike in shape and depth."""
    tf.random.set_seed(0)
    keras.backend.clear_session()
    inputs = keras.Input((4,)), keras.Input((4,))
    a, b, c, d = (keras.layers.Dense(2, "tanh", bias_initializer="normal") for _ in range(4))
    x = keras.layers.Concatenate()([d(inputs[1]), b(inputs[0]), a(inputs[1]), c(inputs[0])])
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    tf.train.Checkpoint(model=model).save(str(HERE / "branches"))
    x = data()[0]
    np.savez(HERE / "branches.npz", saved=model([x, x + 1]).numpy())


class Towers(keras.Model):
    """Two models of one function: their layers have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = tower(), tower()
        self.head = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.user(x) * self.item(x + 1))


def tower() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, "tanh", name="hidden")(inputs))


def recurrent() -> keras.Model:
    """Layers of one shape whose variables are further inside; and statistics of data."""
    inputs, layers = keras.Input((4,)), keras.layers
    normal = layers.Normalization()
    normal.adapt(3 * data()[0] + 1)
    x = layers.Reshape((2, 2))(normal(inputs))
    every = [layers.GRU(3, name=name)(x) for name in ("a", "b")]
    every += [layers.Bidirectional(layers.LSTM(2), name=name)(x) for name in ("c", "d")]
    scaled = [(k + 1.0) * y for k, y in enumerate(every)]
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()(scaled)))


def alike() -> keras.Model:
    inputs = keras.Input((4,))
    first, second = (keras.layers.Dense(3, "tanh")(inputs) for _ in range(2))
    return keras.Model(inputs, keras.layers.Dense(1)(first + 2 * second))


def gan() -> None:
    """As TensorFlow's DCGAN tutorial saves it."""
    tf.random.set_seed(0)
    keras.backend.clear_session()
    ends = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(n)]) for n in (4, 1)]
    optimizers = [keras.optimizers.legacy.Adam(0.05), keras.optimizers.Adam(0.01)]
    for model, optimizer in zip(ends, optimizers, strict=True):
        train(model, optimizer)
    tf.train.Checkpoint(
        generator_optimizer=optimizers[0],
        discriminator_optimizer=optimizers[1],
        generator=ends[0],
        discriminator=ends[1],
    ).save(str(HERE / "gan"))
    np.savez(HERE / "gan.npz", saved=ends[1](ends[0](data()[0])).numpy())


def of_fit() -> None:
    """Files of a compiled model: of `save_weights`, and a folder of `CheckpointManager`."""
    tf.random.set_seed(0)
    keras.backend.clear_session()
    model, (x, y) = functional(), data()
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    model.fit(x, y, BATCH, shuffle=False, verbose=0)
    saved = model(x).numpy()
    model.save_weights(HERE / "save_weights" / "w")
    everything = tf.train.Checkpoint(net=model, opt=model.optimizer)
    manager = tf.train.CheckpointManager(everything, str(HERE / "managed"), max_to_keep=2)
    manager.save()
    model.fit(x, y, BATCH, shuffle=False, verbose=0)
    manager.save()
    np.savez(HERE / "of_fit.npz", saved=saved, continued=model(x).numpy())


if __name__ == "__main__":
    main()
