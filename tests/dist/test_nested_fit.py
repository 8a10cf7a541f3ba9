"""Callbacks and data of `fit` train, evaluate and predict with other models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import Trainer
from ktrainer.script.routing import Routing
from tests.contracts.running import use_float64

ROWS, BATCH = 24, 4
QUIET = {
    "logging": {"progress": "none"},
    "checkpoint": {"resume": "never"},
    "data": {"batch_size": BATCH, "shuffle": False},
}


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    return x, x.sum(1, keepdims=True)


def build(seed: int) -> keras.Model:
    initial = keras.initializers.GlorotUniform(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=initial)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


class Probe(keras.callbacks.Callback):
    """Trains a model of its own after each epoch, and in the middle of the second."""

    def __init__(self, fit: Callable[..., Any]) -> None:
        super().__init__()
        self.fit = fit
        self.found: list[Any] = []

    def probe(self, seed: int) -> None:
        probe = build(seed)
        history = self.fit(probe, *data(10), epochs=2, batch_size=5, shuffle=False, verbose=0)
        self.found.append((history.history, [np.array(w) for w in probe.get_weights()]))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2 and len(self.found) == 1:
            self.probe(7)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.probe(epoch + 2)


def outcome(fit: Callable[..., Any]) -> Any:
    use_float64()
    model, probe = build(1), Probe(fit)
    settings = {"epochs": 3, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = fit(model, *data(), **settings, callbacks=[probe])
    weights = [np.array(w) for w in model.get_weights()]
    return history.epoch, int(model.optimizer.iterations), (history.history, weights), probe.found


def with_trainer() -> Any:
    with Trainer({**QUIET, "backend": "data_parallel", "checkpoint": {"every": "1ep"}}) as trainer:
        found = outcome(trainer.fit)
        state = trainer.state
        outer = (state.progress.step, state.steps_per_epoch, state.fits, state.inside)
        return found, outer, str(trainer.run_dir), trainer.model.name


@pytest.mark.exhaustive
@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [1, 2])
def test_a_fit_inside_a_fit_has_kerass_numbers(ranks: Callable[..., Any], size: int) -> None:
    epochs, updates, *expected = outcome(keras.Model.fit)
    assert updates == 18
    found = ranks(size).run(with_trainer, deadline=200)
    for rank in found:
        (theirs, iterations, *ours), outer, _, _ = rank
        assert (theirs, iterations, outer) == (epochs, updates, (18, 6, 1, 0))
        for mine, model in zip([ours[0], *ours[1]], [expected[0], *expected[1]], strict=True):
            for key, values in model[0].items():
                np.testing.assert_allclose(mine[0][key], values, rtol=1e-12)
            for a, b in zip(mine[1], model[1], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-12)
    files = {path.name for path in Path(found[0][2]).iterdir()}
    names = {"checkpoints", *(f"checkpoints-inside-{n}" for n in (1, 2, 3, 4))}
    assert names <= files
    assert {"metrics.csv", "metrics-inside-4.csv"} <= files


def encoded(encoder: keras.Model) -> Iterator[Any]:
    """Batches whose targets a model predicts, without end."""
    x, _ = data()
    while True:
        for start in range(0, ROWS, BATCH):
            batch = x[start : start + BATCH]
            yield batch, encoder.predict(batch, verbose=0) + encoder.predict_on_batch(batch)


def trained_on_predictions(kind: str) -> tuple[list[float], list[np.ndarray]]:
    use_float64()
    model, encoder = build(1), build(2)
    given: Any = encoded(encoder)
    if kind == "tf.data":
        signature = tf.TensorSpec((None, 3), "float64"), tf.TensorSpec((None, 1), "float64")
        given = tf.data.Dataset.from_generator(lambda: encoded(encoder), output_signature=signature)
    history = model.fit(given, epochs=2, steps_per_epoch=5, shuffle=False, verbose=0)
    return history.history["loss"], model.get_weights()


def routed(run: Callable[..., Any], *args: Any) -> Any:
    """What an unmodified script returns under `ktrainer run`."""
    settings = {**QUIET, "backend": "data_parallel", "world": {"deadline": 20}}
    routing = Routing(Trainer(settings))
    try:
        return run(*args)
    finally:
        routing.close()


@pytest.mark.parametrize("kind", ["generator", "tf.data"])
def test_data_may_predict_in_threads_that_read_it(ranks: Callable[..., Any], kind: str) -> None:
    losses, weights = trained_on_predictions(kind)
    for mine, theirs in ranks(2).run(routed, trained_on_predictions, kind):
        np.testing.assert_allclose(mine, losses, rtol=1e-12)
        np.testing.assert_allclose(theirs[0], weights[0], rtol=1e-12)


def trained_while_read() -> None:
    def batches() -> Iterator[Any]:
        yield from [data(BATCH)] * 3  # two are read by the thread of the script
        build(2).train_on_batch(*data(BATCH))

    build(1).fit(batches(), steps_per_epoch=6, shuffle=False, verbose=0)


def test_data_may_not_train_in_threads_that_read_it(ranks: Callable[..., Any]) -> None:
    for outcome in ranks(2).outcomes(routed, trained_while_read):
        assert "`train_on_batch` of model 'sequential" in str(outcome.error)
