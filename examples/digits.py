"""The quick start: handwritten digits that come with scikit-learn, in seconds on any CPU.

    python examples/digits.py
    ktrainer run -n 2 examples/digits.py backend=data_parallel

Both train the same way, step by step; their numbers differ by rounding only. Every setting can
be given as key=value: trainer.epochs=5 data.batch_size=64 checkpoint.every=1ep
"""

from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
from data import data_folder
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

DEFAULTS = {"trainer": {"epochs": 15}}  # over ktrainer's; a file and key=value win


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ],
        name="digits",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def load_split() -> tuple[Any, Any]:
    """1,437 images with labels to train on, and 360 to validate."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, x_val, y, y_val = train_test_split(
        images, labels, test_size=360, random_state=0, stratify=labels
    )
    return (x, y), (x_val, y_val)


def main() -> None:
    _, argv = data_folder()  # not needed: the digits come with scikit-learn
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    train, validation = load_split()
    history = trainer.fit(build_model, train, validation_data=validation)
    trainer.save(trainer.run_dir / "digits.keras")
    if trainer.world.is_root:
        accuracy = history.history["val_accuracy"][-1]
        print(f"validation accuracy {accuracy:.4f}; the model is in {trainer.run_dir}/digits.keras")


if __name__ == "__main__":
    main()
