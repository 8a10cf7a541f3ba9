"""A generative adversarial network: two networks, two optimizers, one `train_step`.

    python examples/gan.py
    ktrainer run -n 2 examples/gan.py backend=data_parallel

Each call of an optimizer's `apply` reduces that network's gradients over all ranks.
`--data-dir DIR` as in mnist_cnn.py.
"""

from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import tensorflow as tf
from data import data_folder, mnist
from keras import layers, ops
from vae import picture

# Over ktrainer's own; a file and key=value win.
DEFAULTS = {"trainer": {"epochs": 5}, "data": {"batch_size": 64}}
LATENT = 32


class GAN(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="gan")
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(7 * 7 * 32, activation="relu"),
                layers.Reshape((7, 7, 32)),
                layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.discriminator = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(32, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Conv2D(64, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.seeds = keras.random.SeedGenerator(0)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data: Any) -> dict[str, Any]:
        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        shape = (ops.shape(real)[0], LATENT)

        fake = self.generator(keras.random.normal(shape, seed=self.seeds))
        with tf.GradientTape() as tape:
            on_real, on_fake = self.discriminator(real), self.discriminator(fake)
            d_loss = self.cross_entropy(ops.ones_like(on_real), on_real)
            d_loss += self.cross_entropy(ops.zeros_like(on_fake), on_fake)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        noise = keras.random.normal(shape, seed=self.seeds)
        with tf.GradientTape() as tape:
            on_fake = self.discriminator(self.generator(noise))
            g_loss = self.cross_entropy(ops.ones_like(on_fake), on_fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)

        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model() -> GAN:
    model = GAN()
    d_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
    model.compile(d_optimizer, g_optimizer=keras.optimizers.Adam(2e-4, beta_1=0.5))
    return model


def main() -> None:
    folder, argv = data_folder()
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    (images, _), _ = mnist(folder)
    trainer.fit(build_model, (images,))
    if trainer.world.is_root:
        latent = keras.random.normal((1, LATENT), seed=1)
        print(picture(ops.convert_to_numpy(trainer.model.generator(latent)[0])))


if __name__ == "__main__":
    main()
