"""`ktrainer checkpoint export`: layers in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

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
