"""A training loop of one's own that resumes at the step at which it was ended, whatever ended it.

    python examples/custom_loops/resumable.py run.dir=runs/a checkpoint.every=10ba
    ktrainer run -n 2 examples/custom_loops/resumable.py backend=data_parallel run.dir=runs/b

`trainer.steps` gives the batches, and around each step what `fit` does: checkpoints, signals, the
learning rate, the NaN guard, progress and loggers. Everything that the loop changes is given to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))  # the examples share their data's reader
from data import data_folder
from digits import build_model, load_split


def main() -> None:
    _, argv = data_folder()
    trainer = Trainer.from_cli(argv=argv, defaults={"trainer": {"epochs": 3}})
    (x, y), (x_val, y_val) = load_split()
    batch = trainer.config.data.batch_size

    with trainer.scope():
        model = build_model()
        optimizer = keras.optimizers.Adam(2e-3)
        optimizer.build(model.trainable_variables)
        mean = keras.metrics.Mean("loss")
    state = {"mean": mean, "lines": []}
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        mean.update_state(losses)
        return loss

    def count_right(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        guesses = tf.argmax(model(images, training=False), -1, tf.int64)
        return tf.reduce_sum(tf.cast(guesses == tf.cast(labels, tf.int64), tf.float32))

    validation = trainer.distribute(tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch))

    def report(epoch: int, logs: dict[str, float]) -> None:
        right = sum(
            float(trainer.reduce("sum", trainer.run(count_right, *each))) for each in validation
        )
        accuracy = right / len(y_val)
        state["lines"].append(
            f"epoch {epoch + 1}  loss {logs['mean']:.4f}  val_accuracy {accuracy:.4f}"
        )

    training = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0)
    steps = trainer.steps(
        training.batch(batch, drop_remainder=True),
        model=model,
        optimizer=optimizer,
        state=state,
        callbacks=keras.callbacks.LambdaCallback(on_epoch_end=report),
    )
    for images, labels in steps:
        if steps.epoch_begins:
            mean.reset_state()
        loss = trainer.reduce("sum", trainer.run(train_step, images, labels))
        steps.log(loss=float(loss), mean=float(mean.result()))
    if trainer.world.is_root:
        print("\n".join(state["lines"]))
    trainer.close()


if __name__ == "__main__":
    main()
