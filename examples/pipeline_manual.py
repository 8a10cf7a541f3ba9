"""A pipeline whose stages are chosen by hand, with `with ktrainer.partition(i):`.

    ktrainer run -n 2 examples/pipeline_manual.py
    ktrainer run -n 2 examples/pipeline_manual.py \\
        'backend.stages={0: "convolution_[12]", 1: "convolution_3|hidden|logits"}'

In the model's code, what is created or called inside of a scope is on that stage; what is outside
of all of them, and has weights, is on `backend.default_partition` (0), and what has none stays with
what it is computed from. The second line says the same in the configuration, by names of layers;
where both are given, the configuration wins. Without scopes and names, the stages are chosen
automatically.
"""

from typing import Any

import ktrainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
from data import data_folder
from digits import load_split
from keras import layers

# Over ktrainer's own; a file and key=value win.
DEFAULTS: dict[str, Any] = {
    "backend": {"name": "pipeline", "partitions": 2, "microbatches": 8},
    "data": {"batch_size": 64},
    "trainer": {"epochs": 10},
}


def build_model() -> keras.Model:
    image = keras.Input((8, 8, 1))
    with ktrainer.partition(0):
        x = layers.Conv2D(32, 3, padding="same", activation="relu", name="convolution_1")(image)
        y = layers.Conv2D(32, 3, padding="same", activation="relu", name="convolution_2")(x)
    x = layers.MaxPooling2D()(x + y)  # no scope and no weights: with its inputs, on stage 0
    with ktrainer.partition(1):
        x = layers.Conv2D(64, 3, padding="same", activation="relu", name="convolution_3")(x)
        x = layers.Dense(256, activation="relu", name="hidden")(layers.Flatten()(x))
        logits = layers.Dense(10, name="logits")(x)
    model = keras.Model(image, logits, name="by_hand")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    _, argv = data_folder()  # not needed: the digits come with scikit-learn
    trainer = ktrainer.Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    train, validation = load_split()
    trainer.fit(build_model, train, validation_data=validation)
    results = trainer.evaluate(trainer.model, validation)
    if trainer.world.is_root:
        print("validation:", {name: round(value, 4) for name, value in results.items()})


if __name__ == "__main__":
    main()
