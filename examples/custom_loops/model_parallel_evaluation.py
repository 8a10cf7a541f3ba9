"""A model in stages in a loop of one's own: SageMaker's script with evaluation, on Keras 3.

    ktrainer run -n 2 examples/custom_loops/model_parallel_evaluation.py

Each process holds one stage. Started again, it continues after the last epoch that is in
`--checkpoints DIR`. Options: `--data-dir DIR` (as for `mnist_cnn.py`), `--epochs N`,
`--steps N` (of each epoch), `--partitions N`, `--dtype float64`, `--weights FILE.weights.h5`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ktrainer.modelparallel as smp  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples share their data's reader
from data import data_folder, mnist


class MyModel(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv = keras.layers.Conv2D(32, 3, activation="relu")
        self.flatten = keras.layers.Flatten()
        self.dense1 = keras.layers.Dense(128, activation="relu")
        self.dense2 = keras.layers.Dense(10)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        x = self.conv(x)
        x = self.flatten(x)
        x = self.dense1(x)
        return self.dense2(x)


def main() -> None:
    folder, words = data_folder()
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", default="")
    options = parser.parse_args(words)

    smp.init({"partitions": options.partitions, "microbatches": 2})
    keras.config.set_floatx(options.dtype)
    keras.config.set_dtype_policy(options.dtype)
    keras.utils.set_random_seed(0)  # the same initial weights, whoever holds them

    (x_train, y_train), (x_test, y_test) = mnist(folder)
    # All stages of a model see the same batches, which are divisible by the microbatches.
    train_ds = (
        tf.data.Dataset.from_tensor_slices((x_train, y_train))
        .shuffle(10_000, seed=0)
        .batch(64, drop_remainder=True)
        .take(options.steps)
    )
    test_ds = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(200, drop_remainder=True)

    model = MyModel()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    test_loss = keras.metrics.Mean()
    test_accuracy = keras.metrics.SparseCategoricalAccuracy()
    done = tf.Variable(0)

    @smp.step
    def get_grads(images: tf.Tensor, labels: tf.Tensor) -> tuple:
        predictions = model(images, training=True)
        loss = loss_object(labels, predictions)
        grads = smp.gradients(loss, model.trainable_variables)
        return grads, loss

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        gradients, loss = get_grads(images, labels)
        gradients = [g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    @smp.step
    def get_predictions(images: tf.Tensor, labels: tf.Tensor) -> tuple:
        predictions = model(images, training=False)
        return predictions, loss_object(labels, predictions)

    @tf.function
    def test_step(images: tf.Tensor, labels: tf.Tensor) -> None:
        predictions, loss = get_predictions(images, labels)
        test_loss.update_state(loss.reduce_mean())
        test_accuracy.update_state(labels, predictions.merge())

    if options.checkpoints:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epochs=done)
        manager = smp.CheckpointManager(checkpoint, options.checkpoints, max_to_keep=2)
        manager.restore()  # the model gets its values when its first step cuts it

    for epoch in range(int(done), options.epochs):
        for images, labels in train_ds:
            train_step(tf.cast(images, options.dtype), labels)
        test_loss.reset_state()
        test_accuracy.reset_state()
        for images, labels in test_ds:
            test_step(tf.cast(images, options.dtype), labels)
        done.assign_add(1)
        if options.checkpoints:
            manager.save()
        if smp.rank() == 0:
            loss, accuracy = test_loss.result(), test_accuracy.result()
            print(f"epoch {epoch + 1}  loss {loss:.6f}  accuracy {accuracy:.4f}")
    if options.weights:
        model.save_model(options.weights)
    smp.shutdown()


if __name__ == "__main__":
    main()
