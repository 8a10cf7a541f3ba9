"""Batches that are not lists of examples: nodes, and more edges between them."""

import json

import keras
import numpy as np
import tensorflow as tf

keras.config.set_floatx("float64")
keras.utils.set_random_seed(5)
random = np.random.default_rng(0)
nodes, edges = random.normal(size=(5, 4)), random.normal(size=(12, 2))
graph, y = (nodes, edges), random.normal(size=(5, 1))


def generated():
    while True:
        yield graph, y


inputs = [keras.Input((4,)), keras.Input((2,))]
of_nodes, of_edges = keras.layers.Dense(1)(inputs[0]), keras.layers.Dense(1)(inputs[1])
total = keras.layers.Lambda(lambda x: keras.ops.sum(x, axis=0, keepdims=True))(of_edges)
model = keras.Model(inputs, keras.layers.Add()([of_nodes, total]))
model.compile(keras.optimizers.SGD(0.001), "mse")
single = [model.train_on_batch(list(graph), y), model.test_on_batch(list(graph), y)]
predicted = model.predict_on_batch(list(graph)).tolist()
losses = model.fit(generated(), steps_per_epoch=2, epochs=2, verbose=0).history["loss"]
pipeline = tf.data.Dataset.from_tensors((graph, y)).repeat(3)
losses += model.fit(pipeline, verbose=0).history["loss"]
after = model.predict_on_batch(list(graph)).tolist()
record = {"single": single, "predicted": predicted, "losses": losses, "after": after}
print("RESULT " + json.dumps(record, default=float))
