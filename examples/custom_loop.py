"""A training loop of one's own, under any backend but `pipeline`.

    python examples/custom_loop.py
    ktrainer run -n 2 examples/custom_loop.py backend=data_parallel
    python examples/custom_loop.py backend=tf_distribute backend.strategy=mirrored backend.devices=2
    ktrainer run -n 2 examples/custom_loop.py backend=tf_distribute \\
        backend.strategy=multi_worker_mirrored

As the tf.distribute tutorials teach: every replica sums its examples' losses and divides by the
size of the *global* batch; gradients are summed over replicas, so that they are those of the mean
loss, whatever the number of replicas.
"""

from __future__ import annotations

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import tensorflow as tf
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
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(images, training=True))
            loss = tf.reduce_sum(losses) / batch
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def count_right(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        guesses = tf.argmax(model(images, training=False), -1, tf.int64)
        return tf.reduce_sum(tf.cast(guesses == tf.cast(labels, tf.int64), tf.float32))

    training = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0)
    training = trainer.distribute(training.batch(batch, drop_remainder=True))
    validation = trainer.distribute(tf.data.Dataset.from_tensor_slices((x_val, y_val)).batch(batch))
    for epoch in range(trainer.config.trainer.epochs):
        total, steps = 0.0, 0
        for images, labels in training:
            total += float(trainer.reduce("sum", trainer.run(train_step, images, labels)))
            steps += 1
        right = sum(
            float(trainer.reduce("sum", trainer.run(count_right, *each))) for each in validation
        )
        if trainer.world.is_root:
            accuracy = right / len(y_val)
            print(f"epoch {epoch + 1}  loss {total / steps:.4f}  val_accuracy {accuracy:.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
