"""Callbacks that decide on the logs of batches, and some that only rank 0 is given."""

import json
import os

import keras
import numpy as np

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.random((64, 4)), rng.random((64, 1))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.2), "mse")
record = {"seen": [], "files": []}


class StopOnBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        record["seen"].append(float(logs["loss"]))
        if len(record["seen"]) > 20 and logs["loss"] < record["seen"][0]:
            self.model.stop_training = True


checkpoint = keras.callbacks.ModelCheckpoint
best = checkpoint("best.keras", "loss", save_best_only=True, mode="min", save_freq=5)
model.fit(x, y, epochs=9, batch_size=16, verbose=0, callbacks=[best, StopOnBatch()])
record["best"] = float(best.best)
record["saved"] = [float(w.sum()) for w in keras.models.load_model("best.keras").get_weights()]

each = checkpoint("each-{epoch}.keras")
model.fit(x, y, epochs=2, verbose=0 if rank else 2, batch_size=16, callbacks=[] if rank else [each])
model.fit(x, y, epochs=3, initial_epoch=2, verbose=0, batch_size=16, callbacks=[each])
record["files"] = sorted(name for name in os.listdir() if name.startswith("each"))
record["last"] = [float(w.sum()) for w in keras.models.load_model("each-3.keras").get_weights()]
print("RESULT", json.dumps(record))
