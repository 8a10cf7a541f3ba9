"""A convolutional network on MNIST.

    python examples/mnist_cnn.py
    ktrainer run -n 2 examples/mnist_cnn.py backend=data_parallel

`--data-dir DIR` reads MNIST's gzipped IDX files from a folder instead of downloading them; the
test files alone are enough.
"""

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
from data import data_folder, mnist
from keras import layers

# Over ktrainer's own; a file and key=value win.
DEFAULTS = {"trainer": {"epochs": 3}, "data": {"batch_size": 64}}


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, use_bias=False),
            # Statistics of the whole batch, not of a rank's share: the same on any world size.
            layers.BatchNormalization(synchronized=True),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(10),
        ],
        name="mnist_cnn",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    folder, argv = data_folder()
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    train, validation = mnist(folder)
    trainer.fit(build_model, train, validation_data=validation)
    results = trainer.evaluate(trainer.model, validation)
    if trainer.world.is_root:
        print("validation:", {name: round(value, 4) for name, value in results.items()})


if __name__ == "__main__":
    main()
