"""Ranks that are given the arguments of `Model.fit` have its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.distributed import current_world
from ktrainer.errors import DataError, DivergenceError
from tests.contracts.running import use_float64

QUIET = {"logging": {"progress": "none", "csv": False}, "checkpoint": {"resume": "never"}}


def arrays(rows: int = 23, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    return x, x @ random.normal(size=(3, 2)) + 1


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return arrays(7, index)


class Reordered(Batches):
    """Begins with another batch each time that it has been read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__((self.first + index) % len(self))

    def on_epoch_end(self) -> None:
        self.first += 1


def calls() -> dict[str, dict[str, Any]]:
    x, y = arrays()
    reordered = Reordered()
    both = {"x": x, "y": y, "batch_size": 5, "epochs": 3}
    weights = np.linspace(0.0, 2.0, len(x))
    return {
        "shuffled": {**both, "validation_split": 0.3, "sample_weight": weights},
        "within batches": {**both, "shuffle": "batch", "validation_data": arrays(9, 1)},
        "steps": {**both, "steps_per_epoch": 2, "epochs": 5, "initial_epoch": 1},
        "PyDataset": {"x": Batches(), "epochs": 2, "validation_data": Batches()},
        "one for both": {"x": reordered, "epochs": 3, "validation_data": reordered},
    }


def build() -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    model.add(keras.layers.Dense(2))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def outcomes(fit: Callable[..., Any]) -> list[Any]:
    """Histories, epochs and weights of all calls."""
    use_float64()
    found = []
    for arguments in calls().values():
        keras.utils.set_random_seed(1)
        model = build()
        history = fit(model, **arguments, verbose=0)
        found.append((history.history, history.epoch, [w.numpy() for w in model.weights]))
    return found


def with_trainer() -> list[Any]:
    with Trainer({**QUIET, "backend": "data_parallel"}) as trainer:
        return outcomes(trainer.fit)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_ranks_have_the_numbers_of_fit(ranks: Callable[..., Any]) -> None:
    expected = outcomes(keras.Model.fit)
    for rank in ranks(2).run(with_trainer, deadline=200):
        for (history, epochs, weights), theirs, name in zip(rank, expected, calls(), strict=True):
            assert epochs == theirs[1]
            assert list(history) == list(theirs[0])
            for key, values in theirs[0].items():
                np.testing.assert_allclose(history[key], values, rtol=1e-9, err_msg=name)
            for mine, weight in zip(weights, theirs[2], strict=True):
                np.testing.assert_allclose(mine, weight, rtol=1e-9, atol=1e-12, err_msg=name)


class Ends(keras.Model):
    """Takes whatever nodes and edges there are."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return keras.ops.sum(self.dense(inputs["nodes"]), axis=0, keepdims=True)


def of_graphs() -> keras.Model:
    model = Ends()
    model.compile("sgd", "mse")
    return model


def refused() -> list[str]:
    """What is said of batches that are no examples, and of arguments that differ by rank."""
    here = current_world()
    with Trainer({**QUIET, "backend": "data_parallel"}) as trainer:

        def python() -> Any:
            yield {"nodes": np.ones((6, 3)), "edges": np.ones((4, 2))}, np.ones((1, 1))

        def varying(rows: int) -> tf.data.Dataset:
            made = tf.data.Dataset.from_tensor_slices([[1.0, 2.0, 3.0]] * 6)
            few = tf.data.Dataset.from_tensor_slices([[1.0, 2.0]] * rows)
            return tf.data.Dataset.zip(made.batch(6), few.batch(rows))

        def said(kind: type[Exception], *given: Any, model: Any = build, **more: Any) -> str:
            with pytest.raises(kind) as raised:
                trainer.fit(model(), *given, **more)
            return str(raised.value)

        return [
            said(DataError, python, model=of_graphs),
            said(DataError, varying(4)),
            said(DivergenceError, *arrays(), epochs=1 + here.rank),
            said(DivergenceError, *arrays(), initial_epoch=here.rank),
        ]


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [2, 3])
def test_what_ranks_cannot_train_on(ranks: Callable[..., Any], size: int) -> None:
    for rank, (python, dataset, epochs, first) in enumerate(ranks(size).run(refused)):
        rows = 6 // size if python else 0
        assert "x/edges: 4, x/nodes: 6, y: 1" in python
        assert "x: 6, y: 4" in dataset
        assert f"number {rank}, would be {rows} rows" in dataset
        for message in (python, dataset):
            assert "data.batch=per_worker" in message
            assert "backend=local" in message
        assert "trainer.epochs" in epochs
        assert "initial_epoch" in first
