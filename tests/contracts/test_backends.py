"""Every model of the zoo under `data_parallel` gives the numbers of `local`: on 2 ranks, and some
on 3, and in two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from ktrainer import Trainer
from tests.contracts.running import (
    BATCH,
    ROWS,
    Outcome,
    config,
    digest,
    largest_difference,
    local,
    train,
)
from tests.contracts.zoo import ZOO
from tests.contracts.zoo_parts import floats
from tests.tf_distribute.running import ONE_PROCESS

EXACT = [name for name, case in ZOO.items() if case.exact]
NOISY = [name for name, case in ZOO.items() if not case.exact]
# A pipeline refuses steps of a model's own, averages of weights, and losses that read weights. What
# sees whole batches draws and normalises as one process does.
REFUSED = ("vae", "gan", "averaged_weights", "own_loss_and_metrics", "nested_logs")
IN_STAGES = [name for name in ZOO if name not in REFUSED][1::2]
WEIGHTS, LOGS = 1e-10, 1e-9  # relative, in float64: above round-off, below any error


def compare(name: str, expected: Outcome, ours: Outcome) -> float:
    """Check one model; the largest relative difference of its weights."""
    difference, variable = largest_difference(ours.weights, expected.weights)
    assert difference <= WEIGHTS, f"{name}: {variable} differs by {difference:.1e}"
    assert list(ours.history) == list(expected.history), name
    assert ours.epochs == expected.epochs
    for key, values in expected.history.items():
        np.testing.assert_allclose(
            ours.history[key], values, rtol=LOGS, atol=1e-12, err_msg=f"{name}: {key}"
        )
    return difference


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "chosen"),
    [(2, EXACT[::2]), (2, EXACT[1::2]), (3, EXACT[1::6])],
    ids=["2-even", "2-odd", "3"],
)
def test_models_equal_one_process(ranks: Callable[..., Any], size: int, chosen: list[str]) -> None:
    by_rank = ranks(size).run(train, chosen, name="data_parallel", engine="mpi", deadline=280)
    largest = {}
    for name in chosen:
        ours = [rank[name][0] for rank in by_rank]
        assert len({digest(outcome) for outcome in ours}) == 1, f"{name}: ranks differ"
        assert all(outcome.history == ours[0].history for outcome in ours), name
        largest[name] = compare(name, local(name), ours[0])
    print({name: f"{difference:.1e}" for name, difference in largest.items()})


@pytest.mark.exhaustive
def test_noisy_models_are_equal_on_all_ranks_and_in_every_run(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(2).run(train, NOISY, times=2, name="data_parallel", engine="mpi", deadline=200)
    for name in NOISY:
        outcomes = [outcome for rank in by_rank for outcome in rank[name]]
        assert len({digest(outcome) for outcome in outcomes}) == 1, name
        assert all(outcome.history == outcomes[0].history for outcome in outcomes), name
        values = [value for values in outcomes[0].history.values() for value in values]
        assert np.isfinite(values).all(), name


@pytest.mark.exhaustive
def test_models_in_two_stages_equal_one_process(ranks: Callable[..., Any]) -> None:
    by_rank = ranks(2).run(train, IN_STAGES, name="pipeline", partitions=2, deadline=280)
    for name in IN_STAGES:
        expected, ours = local(name), [rank[name][0] for rank in by_rank]
        for part in ("weights", "slots"):
            truth, held = getattr(expected, part), [getattr(rank, part) for rank in ours]
            for (path, value), *both in zip(truth, *held, strict=True):
                here = [mine for mine in both if mine[1].size or not value.size]
                assert here, f"{name}: no rank has {path}"
                difference, _ = largest_difference(here, [(path, value)] * len(here))
                assert difference <= WEIGHTS, f"{name}: {path} differs by {difference:.1e}"
        assert ours[0].history == ours[1].history
        for key, numbers in expected.history.items():
            np.testing.assert_allclose(ours[0].history[key], numbers, LOGS, 1e-12, err_msg=key)


class Keeps(keras.callbacks.Callback):
    """Keeps the outputs of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[np.ndarray] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.outputs.append(np.array(logs["outputs"]))


def rows_of_parts(**backend: Any) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """What a model predicts that puts out a row for each of four parts of an example: with Keras,
    and with ktrainer; and what a callback then heard of each batch."""
    keras.utils.set_random_seed(0)
    parts = keras.Input((4, 3))
    outputs = keras.layers.Dense(2)(keras.ops.reshape(parts, (-1, 3)))
    model, x = keras.Model(parts, outputs), floats(ROWS, 4, 3)  # the last batch has one example
    expected = model.predict(x, batch_size=BATCH, verbose=0)
    with Trainer(config(backend=backend)) as trainer:
        return expected, trainer.predict(model, x, callbacks=[keeps := Keeps()]), keeps.outputs


@pytest.mark.parametrize(
    ("size", "backend"),
    [
        (1, {"name": "tf_distribute", "strategy": "mirrored", "devices": 2}),
        (2, {"name": "data_parallel", "engine": "mpi"}),
        (2, {"name": "pipeline", "partitions": 2, "microbatches": 2}),
    ],
    ids=["mirrored", "ranks", "stages"],
)
def test_outputs_with_more_rows_than_the_batch(
    ranks: Callable[..., Any], size: int, backend: dict[str, Any]
) -> None:
    group = ranks(size, ONE_PROCESS) if size == 1 else ranks(size)
    for expected, found, heard in group.run(rows_of_parts, deadline=120, **backend):
        assert len(expected) == 4 * ROWS
        assert [len(outputs) for outputs in heard] == [4 * BATCH, 4 * BATCH, 4]
        for outputs in (found, np.concatenate(heard)):
            np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-7)
