"""An autoencoder, and models of parts of it that are used while it is trained."""

import json

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).random((32, 4))
inputs = keras.Input((4,))
code = keras.layers.Dense(3)(keras.layers.Dense(8, activation="relu")(inputs))
hidden = keras.layers.Dense(8, activation="relu")(code)
whole = keras.Model(inputs, keras.layers.Dense(4)(hidden))
encoder, probe = keras.Model(inputs, code), keras.Model(inputs, hidden)
probe.compile(loss="mse")
whole.compile(keras.optimizers.SGD(0.3, momentum=0.9), "mse")
record = {"seen": []}


class UseParts(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        record["seen"] += [
            float(np.abs(encoder.predict(x, verbose=0)).sum()),
            float(probe.evaluate(x, np.ones((32, 8)), verbose=0)),
            float(np.abs(probe.predict_on_batch(x[:5])).sum()),
        ]
        encoder.save_weights(f"encoder-{epoch}.weights.h5")


history = whole.fit(x, x, epochs=3, batch_size=16, verbose=0, shuffle=False, callbacks=[UseParts()])
record["loss"] = history.history["loss"]
record["weights"] = [float(np.abs(weight).sum()) for weight in probe.get_weights()]
encoder.save("encoder.keras")
loaded = keras.models.load_model("encoder.keras")
record["loaded"] = float(np.abs(loaded.predict(x, verbose=0)).sum())
loaded.load_weights("encoder-0.weights.h5")
record["first"] = float(np.abs(loaded.predict(x, verbose=0)).sum())
record["evaluated"] = float(whole.evaluate(x, x, verbose=0))
record["more"] = whole.fit(x, x, verbose=0, shuffle=False, batch_size=16).history["loss"]
print("RESULT", json.dumps(record))
