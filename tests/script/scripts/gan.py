"""Two models in turn, made in a strategy's scope: what one trains, the other has frozen."""

import json

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    discriminator = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    discriminator.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"])
    generator = keras.Sequential(
        [keras.Input((2,)), layers.Dense(6, activation="tanh"), layers.Dense(4)]
    )
    latent = keras.Input((2,))
    gan = keras.Model(latent, discriminator(generator(latent)))
    gan.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")

real = np.random.normal(size=(40, 4))
record = {"steps": []}
for _ in range(4):
    rows = np.random.randint(0, 40, 7)
    noise = np.random.normal(size=(7, 2))
    fake = generator.predict(noise, verbose=0)
    discriminator.trainable = True
    losses = discriminator.train_on_batch(real[rows], np.ones((7, 1)))
    losses += discriminator.train_on_batch(fake, np.zeros((7, 1)))
    discriminator.trainable = False
    losses.append(gan.train_on_batch(noise, np.ones((7, 1))))
    record["steps"].append([float(value) for value in losses])
for epoch in range(2):
    noise = np.random.normal(size=(20, 2))
    history = gan.fit(
        noise, np.ones((20, 1)), epochs=epoch + 1, initial_epoch=epoch, batch_size=6, verbose=0
    )
    record["steps"].append(history.history["loss"])
encoder = keras.Model(generator.inputs, generator.layers[0].output)
record["encoder"] = encoder.predict(noise, verbose=0).tolist()
keras.utils.save_img("fake.png", np.abs(fake[:1, :, None]).repeat(3, -1))
for name in ("record.txt", "record-2.txt"):
    with open(name, "w") as file:
        file.write("record")
print("RESULT", json.dumps(record))
