"""A pipeline: a model cut into two stages, one process for each, trained on digits.

    ktrainer run -n 2 examples/pipeline_mlp.py
    ktrainer plan examples/pipeline_mlp.py
    ktrainer run -n 4 examples/pipeline_mlp.py --config configs/pipeline_hybrid.yaml

The first line trains; each process makes and keeps its own stage's weights only. The second says
beforehand what the stages are, what goes between them, and what is to be gained. The third trains
two copies of the two stages, on half of every batch each. In one process: backend=local.
"""

from typing import Any

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

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
WIDTH, DEPTH = 512, 7


def build_model() -> keras.Model:
    """Nothing in it knows of stages. Given to `fit` as a function, it is never made as a whole."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            *[layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)],
            layers.Dense(10),
        ],
        name="mlp",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(5e-4), loss, metrics=["accuracy"])
    return model


def main() -> None:
    _, argv = data_folder()  # not needed: the digits come with scikit-learn
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    train, validation = load_split()
    history = trainer.fit(build_model, train, validation_data=validation)
    trainer.save(trainer.run_dir / "mlp.keras")  # one ordinary file: the stages come together
    if trainer.world.is_root:
        accuracy = history.history["val_accuracy"][-1]
        print(f"validation accuracy {accuracy:.4f}; the model is in {trainer.run_dir}/mlp.keras")


if __name__ == "__main__":
    main()
