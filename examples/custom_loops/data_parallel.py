"""Data parallelism in a loop of one's own: the MNIST script of Horovod and SageMaker, on Keras 3.

    python examples/custom_loops/data_parallel.py
    ktrainer run -n 2 examples/custom_loops/data_parallel.py

Each process trains on its own share of every batch, and its gradients are averaged over processes,
so that the weights are those of one process with the whole batches. Options: `--data-dir DIR` (as
for `mnist_cnn.py`), `--steps N`, `--checkpoint FILE`, `--dtype float64`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ktrainer.dataparallel as sdp  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples share their data's reader
from data import data_folder, mnist

GLOBAL_BATCH = 64


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def pin_device() -> None:
    """One GPU for each process, by its local rank."""
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[sdp.local_rank()], "GPU")


def batches(x: object, y: object, dtype: str) -> tf.data.Dataset:
    """This process's rows of each global batch, again and again."""
    whole = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(10_000, seed=0)
    whole = whole.batch(GLOBAL_BATCH, drop_remainder=True)
    share = GLOBAL_BATCH // sdp.size()
    start = sdp.rank() * share
    return whole.map(
        lambda x, y: (tf.cast(x[start : start + share], dtype), y[start : start + share])
    ).prefetch(1)


def main() -> None:
    folder, words = data_folder()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(words)

    sdp.init()
    pin_device()
    keras.config.set_floatx(options.dtype)  # of losses
    keras.config.set_dtype_policy(options.dtype)
    keras.utils.set_random_seed(0)  # the order of the data must be the same on every rank
    (x, y), (x_test, y_test) = mnist(folder)

    model = build_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # The global batch does not grow with the number of processes, so the rate does not, either.
    optimizer = keras.optimizers.Adam(0.001)
    optimizer.build(model.trainable_variables)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = sdp.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return sdp.oob_allreduce(loss)

    # Before the first step; SageMaker's script does it after that, which pollutes a restored model.
    sdp.broadcast_variables(model.variables, root_rank=0)
    sdp.broadcast_variables(optimizer.variables, root_rank=0)
    for step, (images, labels) in enumerate(batches(x, y, options.dtype).take(options.steps)):
        loss = training_step(images, labels)
        if step % 50 == 0 and sdp.rank() == 0:
            print(f"step {step}  loss {loss:.6f}")

    # Each process counts its rows of the test images; the counts are summed.
    guesses = keras.ops.argmax(model.predict(x_test[sdp.rank() :: sdp.size()], verbose=0), -1)
    right = tf.reduce_sum(tf.cast(guesses == y_test[sdp.rank() :: sdp.size()], tf.int32))
    right = sdp.oob_allreduce(right, op=sdp.ReduceOp.SUM)
    if sdp.rank() == 0:
        print(f"accuracy {int(right) / len(y_test):.4f} after {options.steps} steps")
        if options.checkpoint:
            model.save_weights(options.checkpoint)
    sdp.shutdown()


if __name__ == "__main__":
    main()
