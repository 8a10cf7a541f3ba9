"""A variational autoencoder: a model with its own `train_step` and `test_step`.

    python examples/vae.py
    ktrainer run -n 2 examples/vae.py backend=data_parallel

Nothing in the model knows of ranks. What makes a step of your own right on several of them:
losses are means over the examples (or Keras losses, with any reduction), and gradients are
applied through a Keras optimizer. `--data-dir DIR` as in mnist_cnn.py.
"""

from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
import tensorflow as tf
from data import data_folder, mnist
from keras import layers, ops

# Over ktrainer's own; a file and key=value win.
DEFAULTS = {"trainer": {"epochs": 5}, "data": {"batch_size": 128}}
LATENT = 8


class VAE(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="vae")
        self.encoder = keras.Sequential(
            [
                layers.Flatten(),
                layers.Dense(256, activation="relu"),
                layers.Dense(2 * LATENT),
            ]
        )
        self.decoder = keras.Sequential(
            [
                layers.Dense(256, activation="relu"),
                layers.Dense(28 * 28, activation="sigmoid"),
                layers.Reshape((28, 28, 1)),
            ]
        )
        self.seeds = keras.random.SeedGenerator(0)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.kl_tracker = keras.metrics.Mean(name="kl")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.kl_tracker]

    def call(self, images: Any) -> tuple[Any, Any, Any]:
        mean, log_variance = ops.split(self.encoder(images), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(0.5 * log_variance) * noise), mean, log_variance

    def losses_of(self, images: Any) -> tuple[Any, Any]:
        """Reconstruction and Kullback-Leibler loss: sums over an image, means over images."""
        decoded, mean, log_variance = self(images)
        wrong = keras.losses.binary_crossentropy(images, decoded)
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        return ops.mean(ops.sum(wrong, (1, 2))), ops.mean(ops.sum(kl, -1))

    def train_step(self, data: Any) -> dict[str, Any]:
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            reconstruction, kl = self.losses_of(images)
            loss = reconstruction + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.track(loss, kl)

    def test_step(self, data: Any) -> dict[str, Any]:
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        reconstruction, kl = self.losses_of(images)
        return self.track(reconstruction + kl, kl)

    def track(self, loss: Any, kl: Any) -> dict[str, Any]:
        self.loss_tracker.update_state(loss)
        self.kl_tracker.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model() -> VAE:
    model = VAE()
    model.compile(keras.optimizers.Adam(1e-3))
    return model


def picture(image: np.ndarray) -> str:
    """An image of values 0..1 in characters, half as many rows as columns."""
    rows = image[::2, :, 0]
    return "\n".join("".join(" .:-=+*#%@"[int(v * 9.99)] for v in row) for row in rows)


def main() -> None:
    folder, argv = data_folder()
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    (x, _), (x_val, _) = mnist(folder)
    trainer.fit(build_model, (x,), validation_data=(x_val,))
    if trainer.world.is_root:
        latent = keras.random.normal((1, LATENT), seed=1)
        print(picture(ops.convert_to_numpy(trainer.model.decoder(latent)[0])))


if __name__ == "__main__":
    main()
