"""Keras' methods of a model in stages: what works, and what says which call does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

X, Y = np.ones((8, 6)), np.ones((8, 3))


def _calls(model: Any, folder: str) -> dict[str, Callable[[], Any]]:
    return {
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "predict": lambda: model.predict(X, verbose=0),
        "predict_on_batch": lambda: model.predict_on_batch(X),
        "test_on_batch": lambda: model.test_on_batch(X, Y),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
        "fit": lambda: model.fit(X, Y, verbose=0),
        "call": lambda: model(X),
        "get_weights": model.get_weights,
        "layers": lambda: [layer.get_weights() for layer in model.layers],
        "each layer": lambda: [
            layer(np.ones((2, layer.kernel.shape[0]))) for layer in model.layers
        ],
        "save": lambda: model.save(f"{folder}/model.keras"),
        "save_weights": lambda: model.save_weights(f"{folder}/model.weights.h5"),
        "export": lambda: model.export(f"{folder}/exported", verbose=False),
    }


def _messages(calls: dict[str, Callable[[], Any]]) -> dict[str, tuple[str, str]]:
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = ("", "nothing was raised")
        except Exception as error:
            said[name] = (type(error).__name__, str(error))
    return said


def _after_fit() -> Any:
    """What Keras' methods say on this rank, in a callback and after `fit`, and what works."""
    import os

    import keras

    from ktrainer import Callback, Trainer

    folder = f"rank{os.getpid()}"
    os.makedirs(folder)
    found = []

    class Calls(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append(_messages(_calls(self.model, folder)))

    def build() -> Any:
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((6,)), dense(8), dense(8), dense(3)])
        model.compile("sgd", "mse")
        return model

    words = ("backend=pipeline", "backend.partitions=2", "backend.microbatches=2")
    quiet = ("logging.progress=none", "logging.csv=false", "data.batch_size=8")
    with Trainer(overrides=[*words, *quiet]) as trainer:
        trainer.fit(build, (X, Y), callbacks=[Calls()])
        model = trainer.model
        found.append(_messages(_calls(model, folder)))
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        works = [model.count_params(), [layer.name for layer in model.layers], len(lines) > 0]
        works.append(len(model.to_json()) > 0)
        # The model itself is not harmed.
        works.append(sorted(trainer.evaluate(model, (X, Y))))
        return found, works


@pytest.mark.exhaustive
def test_calls_of_keras_after_fit_name_those_of_the_trainer(ranks: Callable[..., Any]) -> None:
    for found, works in ranks(2).run(_after_fit, deadline=150):
        assert works[0] == 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
        assert len(works[1]) == 3
        assert works[2:] == [True, True, ["loss"]]
        assert len(found) == 2
        for said in found:
            for name, (kind, message) in said.items():
                assert kind == "ModelError", (name, kind, message)
                assert message.startswith("the model is cut into stages"), (name, message)
                assert "Exception encountered" not in message, name
                for call in ("trainer.evaluate(", "trainer.predict(", "trainer.save("):
                    assert call in message, name
