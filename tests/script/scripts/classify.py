"""As public scripts are: functional model, fit, callbacks, evaluate, predict, save, load, compile
again, fit in a loop, single batches, argparse."""

import argparse
import json
from pathlib import Path

import keras
import numpy as np
from keras import layers

keras.config.set_floatx("float64")
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--out", type=Path, default=Path("."))
args = parser.parse_args()

keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x = rng.normal(size=(70, 5))
y = (x.sum(1) > 0).astype("int64")

inputs = keras.Input((5,))
hidden = layers.Dense(8, activation="tanh", name="first")(inputs)
hidden = layers.Dense(6, activation="tanh", name="second")(hidden)
model = keras.Model(inputs, layers.Dense(2)(hidden))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

best = args.out / "best.keras"
callbacks = [
    keras.callbacks.ModelCheckpoint(str(best), save_best_only=True),
    keras.callbacks.CSVLogger(args.out / "log.csv"),
    keras.callbacks.EarlyStopping(patience=3),
]
record = {}
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=args.epochs,
    validation_split=0.2,
    verbose=0,
    callbacks=callbacks,
)
record["history"] = history.history
record["evaluate"] = model.evaluate(x, y, verbose=0)
record["evaluate, by name"] = model.evaluate(x, y, verbose=0, return_dict=True)
record["predict"] = model.predict(x[:9], verbose=0).tolist()

model.save(args.out / "model.keras")
model.save_weights(args.out / "model.weights.h5")
again = keras.models.load_model(args.out / "model.keras")
record["loaded"] = again.predict(x[:9], verbose=0).tolist()
record["best"] = keras.models.load_model(best).predict(x[:9], verbose=0).tolist()

record["train_on_batch"] = model.train_on_batch(x[:11], y[:11])
model.load_weights(args.out / "model.weights.h5")
record["test_on_batch"] = model.test_on_batch(x[:11], y[:11])
record["predict_on_batch"] = model.predict_on_batch(x[:5]).tolist()

# Transfer learning: frozen layers, another head of the loss, a second compile; fit in a loop.
model.get_layer("first").trainable = False
model.compile("sgd", loss)
losses = []
for _ in range(3):
    losses += model.fit(x, y, verbose=0, class_weight={0: 1.0, 1: 2.0}).history["loss"]
record["frozen"] = losses
record["last"] = [model.history.history, model.evaluate(x, y, verbose=0)]
if __name__ == "__main__":
    print("RESULT", json.dumps(record))
