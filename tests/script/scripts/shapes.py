"""Kinds of models, data and callbacks: a subclass with a `fit` of its own, callbacks that predict
and save, schedules, several inputs and outputs, tf.data, a PyDataset, an endless generator."""

import json
import os

os.environ["KERAS_BACKEND"] = os.environ.get("ASKED", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
keras.utils.set_random_seed(5)
record = {"fits": 0, "epochs": []}


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))

    def fit(self, *args, **kwargs):
        record["fits"] += 1
        return super().fit(*args, **kwargs)


class Look(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights(f"at{epoch}.weights.h5")
        loss, mae = self.model.evaluate(x[:7], y[:7], verbose=0)
        predicted = self.model.predict(x[:3], verbose=0).tolist()
        record["epochs"].append([sorted(logs.items()), loss, mae, predicted])


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return x[i * 10 : i * 10 + 10], y[i * 10 : i * 10 + 10]


def endless():
    while True:
        yield x[:8], y[:8]


x = np.random.normal(size=(40, 3))
y = x.sum(1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(9)
net = Net()
rate = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
net.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
net.fit(dataset, epochs=2, validation_data=dataset.take(2), verbose=0, callbacks=[Look()])
net.compile(keras.optimizers.SGD(0.05), "mse")
callbacks = [
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=100),
    keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
]
history = net.fit(dataset, epochs=4, verbose=0, callbacks=callbacks)
record["rates"] = [history.history["loss"], history.epoch]
record["PyDataset"] = net.fit(Batches(), epochs=2, verbose=0, shuffle=False).history
record["endless"] = net.fit(endless(), steps_per_epoch=3, epochs=2, verbose=0).history

a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
outputs = {"s": keras.layers.Dense(1, name="s")(a), "t": keras.layers.Dense(2, name="t")(b)}
two = keras.Model([a, b], outputs)
two.compile("adam", {"s": "mse", "t": "mae"}, metrics={"t": ["mae"]})
xs, ys = [x, x[:, :2]], {"s": y, "t": x[:, 1:]}
record["two"] = two.fit(xs, ys, epochs=2, batch_size=11, verbose=0).history
record["evaluate"] = two.evaluate(xs, ys, verbose=0)
record["predict"] = {k: v.tolist() for k, v in two.predict(xs, verbose=0).items()}
record["train_on_batch"] = two.train_on_batch(xs, ys)
few = [part[:5] for part in xs], {k: v[:5] for k, v in ys.items()}
record["shorter"] = two.train_on_batch(*few, return_dict=True)
print("RESULT", json.dumps(record))
