"""A transformer that learns to write Shakespeare, byte by byte.

    python examples/shakespeare.py
    ktrainer run -n 2 examples/shakespeare.py backend=data_parallel
    ktrainer run -n 2 examples/shakespeare.py backend=pipeline backend.partitions=2 \\
        backend.microbatches=4

One table embeds the bytes and predicts them (tied embeddings); in a pipeline the first stage and
the last both hold it, and its gradients are summed. `--data-dir DIR` reads `input.txt` from a
folder instead of downloading the plays. An epoch takes a few minutes on two cores and ends with
text that has names, lines and some words.
"""

from ktrainer import Trainer  # before Keras, so that TensorFlow starts quietly

# isort: split
import keras
import numpy as np
from data import data_folder, shakespeare
from keras import layers, ops

CONTEXT, WIDTH, HEADS, BLOCKS = 128, 128, 4, 2


@keras.saving.register_keras_serializable("shakespeare")
class Bytes(layers.Layer):
    """A vector for each byte and, in reverse, how well each byte fits a vector."""

    def build(self, _: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=(256, WIDTH), initializer="uniform", name="table")

    def call(self, x: keras.KerasTensor, reverse: bool = False) -> keras.KerasTensor:
        return ops.matmul(x, ops.transpose(self.table)) if reverse else ops.take(self.table, x, 0)


@keras.saving.register_keras_serializable("shakespeare")
class Positions(layers.Layer):
    """Adds a learned vector to each place in the context."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(shape=shape[1:], initializer="uniform", name="table")

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return x + self.table


DEFAULTS = {"trainer": {"clip": {"global_norm": 1.0}}}  # over ktrainer's; a file and key=value win


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    normed = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    x = x + attention(normed, normed, use_causal_mask=True)
    hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(WIDTH)(hidden)


def build_model() -> keras.Model:
    tokens = keras.Input((CONTEXT,), dtype="int32")
    table = Bytes()
    x = Positions()(table(tokens))
    for _ in range(BLOCKS):
        x = block(x)
    logits = table(layers.LayerNormalization()(x), reverse=True)
    model = keras.Model(tokens, logits, name="shakespeare")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(2e-3), loss, metrics=["accuracy"])
    return model


def windows(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each stretch of CONTEXT bytes, and the same one byte later: what is to be predicted."""
    count = (len(text) - 1) // CONTEXT
    starts = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
    rows = text[starts].astype(np.int32)
    return rows[:, :-1], rows[:, 1:]


def write(model: keras.Model, prompt: str, length: int, temperature: float = 0.7) -> str:
    """Continue `prompt` by `length` bytes, each drawn from what the model predicts."""
    random = np.random.default_rng(0)
    text = list(prompt.encode())
    for _ in range(length):
        window = np.zeros((1, CONTEXT), np.int32)
        recent = text[-CONTEXT:]
        window[0, : len(recent)] = recent
        logits = model.predict_on_batch(window)[0, len(recent) - 1] / temperature
        chances = np.exp(logits - logits.max(), dtype=np.float64)
        text.append(random.choice(256, p=chances / chances.sum()))
    return bytes(text).decode(errors="replace")


def main() -> None:
    folder, argv = data_folder()
    trainer = Trainer.from_cli(argv=argv, defaults=DEFAULTS)
    text = shakespeare(folder)
    cut = len(text) * 95 // 100
    validation = windows(text[cut:])
    trainer.fit(build_model, windows(text[:cut]), validation_data=validation)
    trainer.save(trainer.run_dir / "shakespeare.keras")
    if trainer.world.is_root:  # from the file, since in a pipeline no process has all of the model
        model = keras.saving.load_model(trainer.run_dir / "shakespeare.keras")
        print(f"--- a sample\n{write(model, 'ROMEO:', 300)}\n---")


if __name__ == "__main__":
    main()
