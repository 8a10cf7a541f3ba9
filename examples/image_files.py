"""Images as files on disk, augmented: in the training process, or on a tf.data service.

    python examples/image_files.py
    ktrainer data-service -n 1 --config service.json &
    python examples/image_files.py data.service.config=service.json

Both train on the same batches. Prints the training examples a second. The files, MNIST as PNG, are
written to the folder `--images DIR` (default: images, in the run folder) when it is not there;
`--count N` says how many. `--data-dir` is that of MNIST's own files.
"""

import argparse
import os
import time
from pathlib import Path

from ktrainer import Callback, Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
import tensorflow as tf
from data import data_folder, mnist
from keras import layers

DEFAULTS = {"trainer": {"epochs": 2}}
SIDE = 64


def write_images(folder: Path, data: Path | None, count: int) -> None:
    """MNIST's first images as LABEL/NUMBER.png."""
    (images, labels), _ = mnist(data)
    part = folder.with_name(f".{folder.name}.{os.getpid()}")  # all of them, or none
    for number, (image, label) in enumerate(zip(images[:count], labels[:count], strict=True)):
        path = part / str(label) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        png = tf.io.encode_png(np.uint8(np.round(image * 255)))
        path.write_bytes(png.numpy())
    part.rename(folder)


def load(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    label = tf.strings.to_number(tf.strings.split(path, "/")[-2], tf.int64)
    image = tf.io.decode_png(tf.io.read_file(path), channels=1)
    return tf.image.resize(tf.cast(image, tf.float32) / 255, (SIDE, SIDE)), label


def augment(place: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    """A crop and a change of light, drawn by the place of the image in the epoch."""
    seed = tf.stack([place, 1])
    padded = tf.image.resize_with_crop_or_pad(image, SIDE + 8, SIDE + 8)
    image = tf.image.stateless_random_crop(padded, (SIDE, SIDE, 1), seed)
    image = tf.image.stateless_random_brightness(image, 0.2, seed)
    return tf.image.stateless_random_contrast(image, 0.8, 1.25, seed)


def training_data(folder: Path) -> tf.data.Dataset:
    """Batches of 64 in another order in each epoch. All ranks read the files in the same order."""
    paths = sorted(str(path) for path in folder.glob("*/*.png"))
    data = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=1)
    data = data.map(load, tf.data.AUTOTUNE).enumerate()
    data = data.map(lambda place, pair: (augment(place, pair[0]), pair[1]), tf.data.AUTOTUNE)
    return data.batch(64).prefetch(tf.data.AUTOTUNE)


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(8, 5, strides=4, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ],
        name="image_files",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


class Rate(Callback):
    """The time from the end of the first epoch to the end of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.ends.append(time.perf_counter())

    def examples_per_second(self, examples: int) -> float:
        return examples * (len(self.ends) - 1) / (self.ends[-1] - self.ends[0])


def main() -> None:
    data, words = data_folder()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=4096)
    own, argv = parser.parse_known_args(words)
    rate = Rate()
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS, callbacks=[rate])
    # Absolute: the workers of a service have a current folder of their own.
    folder = (own.images or Path(trainer.run_dir) / "images").resolve()
    if trainer.world.is_root and not folder.is_dir():
        write_images(folder, data, own.count)
    trainer.world.barrier("images are written")
    history = trainer.fit(build_model, training_data(folder))
    if trainer.world.is_root:
        print(f"loss {history.history['loss'][-1]:.6f}")
        if len(rate.ends) > 1:
            count = sum(1 for _ in folder.glob("*/*.png"))
            print(f"{rate.examples_per_second(count):.0f} examples a second")


if __name__ == "__main__":
    main()
