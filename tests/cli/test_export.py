"""`ktrainer checkpoint export`: layers in another order, and vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.cli import main
from tests.cli.test_checkpoint_command import train


def towers(*names: str, optimizer: str = "sgd", scope: str = "towers") -> Any:
    keras.utils.set_random_seed(len(names[0]))
    layers = [keras.layers.Dense(6, name=name) for name in names]
    model = keras.Sequential([keras.Input((6,)), *layers], name=scope)
    model.compile(optimizer, "sparse_categorical_crossentropy", run_eagerly=True)
    return model


def user_first() -> Any:
    return towers("user", "item")


def item_first() -> Any:
    return towers("item", "user")


def item_first_with_slots() -> Any:
    return towers("item", "user", optimizer="adam")


def item_first_elsewhere() -> Any:
    return towers("item", "user", scope="elsewhere")


def other_names() -> Any:
    return towers("left", "right")


def by_name(model: Any) -> dict[tuple[str, ...], bytes]:
    return {tuple(w.path.split("/")[-2:]): w.numpy().tobytes() for w in model.weights}


def exported(folder: Path, optimizer: str, function: Any) -> int:
    """Train with the user first, and export by a function."""
    train(folder / "run", lambda: towers("user", "item", optimizer=optimizer))
    keras.utils.clear_session()
    words = ["checkpoint", "export", "run", "m.keras", "--model"]
    return main.main([*words, f"{__name__}:{function.__name__}"])


@pytest.mark.parametrize("function", [user_first, item_first])
def test_weights_go_to_the_layers_of_their_names(tmp_path: Path, function: Any) -> None:
    assert exported(tmp_path, "sgd", function) == 0
    ours = by_name(keras.models.load_model("m.keras"))
    assert ours == by_name(keras.models.load_model("run/saved.keras"))


@pytest.mark.parametrize(
    ("optimizer", "function"),
    [("adam", item_first_with_slots), ("sgd", item_first_elsewhere), ("sgd", other_names)],
)
def test_other_layers_in_their_places_are_refused(
    tmp_path: Path, capsys, optimizer: str, function: Any
) -> None:
    assert exported(tmp_path, optimizer, function) == 2
    assert "does not fit this model" in capsys.readouterr().err


def numbered(head_first: bool) -> Any:
    """A body and a head of the same shape, whose names are Keras' numbers."""
    keras.utils.clear_session()
    first, second = keras.layers.Dense(6), keras.layers.Dense(6)
    body, head = (second, first) if head_first else (first, second)
    x = keras.Input((6,))
    model = keras.Model(x, head(body(x)))
    model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return model


def made_in_order() -> Any:
    return numbered(head_first=False)


def head_made_first() -> Any:
    return numbered(head_first=True)


def test_layers_that_only_their_numbers_tell_apart(tmp_path: Path, capsys) -> None:
    """Weights go where they were in the model, or nowhere."""
    train(tmp_path / "run", made_in_order)
    then = keras.models.load_model("run/saved.keras")
    words = ["checkpoint", "export", "run", "m.keras", "--model"]
    assert main.main([*words, f"{__name__}:{head_made_first.__name__}"]) == 2
    assert (
        "has model/dense_1/bias where the training had model/dense/bias" in capsys.readouterr().err
    )
    assert main.main([*words, f"{__name__}:{made_in_order.__name__}"]) == 0
    x = np.ones((1, 6))
    np.testing.assert_array_equal(keras.models.load_model("m.keras")(x), then(x))


class Pair(keras.Model):
    """Two models that a loop trains, in one that is not compiled, with optimizers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, name=name)], name=name)
            for name in ("user", "item")
        )
        self.made = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)]
        self.built = True


def test_models_of_a_loop_with_metrics_are_exported(tmp_path: Path) -> None:
    pair, seen = Pair(), keras.metrics.Mean()
    for optimizer, model in zip(pair.made, (pair.user, pair.item), strict=True):
        optimizer.build(model.trainable_variables)
    words = ["run.dir=run", "trainer.epochs=1", "checkpoint.every=1ep", "logging.progress=none"]
    with Trainer(overrides=words) as trainer:
        given = {"model": [pair.user, pair.item], "optimizer": pair.made, "state": {"seen": seen}}
        for batch in trainer.steps(np.ones((4, 6)), batch_size=2, **given):
            pair.user.weights[0].assign_add(keras.ops.ones((6, 6)) * float(batch[0].shape[0]))
            seen.update_state(1.0)
    export = ["checkpoint", "export", "run", "m.weights.h5", "--model", f"{__name__}:Pair"]
    assert main.main(export) == 0
    other = Pair()
    other.load_weights("m.weights.h5")
    assert by_name(other) == by_name(pair)


def test_weights_alone_need_no_optimizer_of_the_training(tmp_path: Path, capsys) -> None:
    assert exported(tmp_path, "sgd", item_first_with_slots) == 2
    assert (
        "this model has the optimizers ['Adam'], the checkpoint ['SGD']" in capsys.readouterr().err
    )
    function = f"{__name__}:{item_first_with_slots.__name__}"
    assert main.main(["checkpoint", "export", "run", "m.weights.h5", "--model", function]) == 0


@pytest.mark.parametrize("callbacks", [[], [{}], [{"swap_on_epoch": True}]])
def test_averages_of_weights_are_exported(
    tmp_path: Path, capsys, callbacks: list[dict[str, Any]]
) -> None:
    """As `trainer.save` has them; the best ones are those whose loss is listed."""
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5)
    model = towers("user", "item", optimizer=keras.optimizers.LossScaleOptimizer(optimizer))
    x, y = np.random.default_rng(0).normal(size=(24, 6)), np.arange(24) % 3
    words = ["run.dir=run", "trainer.epochs=3", "checkpoint.every=1ep", "logging.progress=none"]
    with Trainer(overrides=[*words, "checkpoint.best=val_loss", "data.batch_size=6"]) as trainer:
        swaps = [keras.callbacks.SwapEMAWeights(**each) for each in callbacks]
        history = trainer.fit(model, (x, y), validation_data=(x, y), callbacks=swaps)
        trainer.save("saved.keras")
    saved = keras.models.load_model("saved.keras")
    for name in ("m.keras", "m.weights.h5"):
        assert main.main(["checkpoint", "export", "run", name]) == 0
        said = capsys.readouterr().out
        assert ("averages that the optimizer keeps" in said) == (
            callbacks != [{"swap_on_epoch": True}]
        )
    assert by_name(keras.models.load_model("m.keras")) == by_name(saved)
    dense = (keras.layers.Dense(6, name=name) for name in ("user", "item"))
    other = keras.Sequential([keras.Input((6,)), *dense])
    other.load_weights("m.weights.h5")
    assert by_name(other) == by_name(saved)
    assert main.main(["checkpoint", "export", "run", "best.keras", "--best"]) == 0
    found = keras.models.load_model("best.keras").evaluate(x, y, verbose=0)
    assert found == pytest.approx(min(history.history["val_loss"]), rel=1e-5)


def with_words(mode: str) -> Any:
    """A model whose vocabularies are found in data, at any depth."""
    words = keras.layers.TextVectorization(max_tokens=9, pad_to_max_tokens=True, output_mode=mode)
    words.adapt(["red green", "green blue", "red red green"])
    numbers = keras.layers.IntegerLookup(vocabulary=[1, 2], output_mode="one_hot")
    numbers.set_vocabulary([7, 8])
    text, count = keras.Input((), dtype="string"), keras.Input((1,), dtype="int64")
    inner = keras.Model(count, numbers(count))
    outputs = keras.layers.Concatenate()([words(text), inner(count)])
    model = keras.Model([text, count], keras.layers.Dense(3)(outputs))
    model.compile("sgd", "mse", run_eagerly=True)
    return model


@pytest.mark.parametrize("mode", ["tf_idf", "multi_hot"])
def test_export_has_the_vocabularies(tmp_path: Path, mode: str) -> None:
    x = [np.array(["red blue", "pink", "green"], object), np.array([[7], [1], [8]])]
    with Trainer(
        overrides=["run.dir=run", "trainer.epochs=1", "checkpoint.every=1ep", "data.batch_size=3"]
    ) as trainer:
        trainer.fit(lambda: with_words(mode), (x, np.zeros((3, 3))))
        expected = trainer.model([tf.constant(each) for each in x])
    assert main.main(["checkpoint", "export", "run", "m.keras"]) == 0
    found = keras.models.load_model("m.keras")([tf.constant(each) for each in x])
    np.testing.assert_array_equal(found, expected)


def with_lookup(layer: Any) -> Any:
    layers = [keras.Input((1,), dtype="int64"), layer, keras.layers.Embedding(3, 2)]
    model = keras.Sequential([*layers, keras.layers.Flatten()])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def not_adapted() -> Any:
    return with_lookup(keras.layers.IntegerLookup())


def adapted_otherwise() -> Any:
    return with_lookup(keras.layers.IntegerLookup(vocabulary=[2, 1]))


def adapted_alike() -> Any:
    layer = keras.layers.IntegerLookup()
    layer.adapt([2, 1, 1])
    return with_lookup(layer)


def train_with_words(layer: Any) -> None:
    words = ["run.dir=run", "trainer.epochs=1", "checkpoint.every=1ep", "logging.progress=none"]
    with Trainer(overrides=words) as trainer:
        trainer.fit(with_lookup(layer), (np.ones((4, 1), int), np.zeros((4, 2))))


def test_a_function_that_adapts_nothing_is_refused(tmp_path: Path, capsys) -> None:
    train_with_words(keras.layers.IntegerLookup(vocabulary=[1, 2]))
    export = ["checkpoint", "export", "run", "m.keras", "--model", f"{__name__}:not_adapted"]
    assert main.main(export) == 2
    error = capsys.readouterr().err
    assert "has no vocabulary, so every word" in error
    assert "--model MODULE" not in error
    assert main.main([*export[:-1], f"{__name__}:adapted_otherwise"]) == 2
    assert "vocabulary of the layer integer_lookup is not that of the" in capsys.readouterr().err
    assert main.main([*export[:-1], f"{__name__}:adapted_alike"]) == 0


def test_a_vocabulary_that_cannot_be_described_is_refused(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that which the layer was made with; all else is described."""
    layer = keras.layers.IntegerLookup(vocabulary=[1, 2])
    layer.set_vocabulary([3, 4])

    def fail(**arguments: Any) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(layer, "get_vocabulary", fail)
    train_with_words(layer)
    assert main.main(["checkpoint", "export", "run", "m.keras"]) == 2
    error = capsys.readouterr().err
    assert "the checkpoint has no vocabulary for the layer integer_lookup" in error
    assert "--model MODULE:FUNCTION" in error
