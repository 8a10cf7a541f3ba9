"""PowerSGD's sums: the paper's formulas in NumPy, closed forms, and what must never be lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.distributed.collectives import InOrder
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.steps.powersgd import PowerSgd, is_compressed, matrix_shape, powersgd_of, set_powersgd
from tests.contracts.running import use_float64
from tests.dist.small import group_mode, more

RANK, SHAPE = 3, (4, 8, 20)  # a matrix of 32 rows and 20 columns
WEIGHTS = {1: [1.0], 2: [0.3, 0.7], 3: [0.5, 0.0, 0.5]}


def _gradient(kind: str, step: int, rank: int) -> np.ndarray:
    """Of a rank: random, zeros, of rank 1, or with a NaN on rank 1."""
    random = np.random.default_rng([step, rank])
    full = random.normal(size=matrix_shape(SHAPE))
    if kind == "zero":
        full = np.zeros_like(full)
    elif kind == "low":
        full = np.outer(full[:, 0], full[0])
    elif kind == "nan" and rank == 1:
        full[3, 4] = np.nan
    return full.reshape(SHAPE)


def _updates(engine: str, kinds: list[str], scale: float | None) -> dict[str, list[Any]]:
    """What updates leave on this rank."""
    here: Any = distributed.current_world()
    if engine == "horovod":
        from ktrainer.distributed.horovod_gradients import HorovodGradients

        sums: Any = HorovodGradients(here)
    else:
        sums = MpiGradients(here)
    use_float64()
    model = keras.Sequential([keras.Input((8, 8, 8)), keras.layers.Flatten()])
    model.kernel = model.add_weight(shape=SHAPE, name="kernel")
    model.bias = model.add_weight(shape=(5,), name="bias")
    compression = PowerSgd(model, RANK)
    variables = [model.kernel, model.bias, model.kernel]
    weight = tf.constant(WEIGHTS[here.size][here.rank], tf.float64)

    @tf.function(autograph=False)
    def step(kernel: tf.Tensor) -> Any:
        by = None if scale is None else tf.constant(scale, tf.float64)
        times = tf.constant(scale or 1.0, tf.float64)
        bias = tf.fill([5], times * (here.rank + 1.0))
        rows = tf.IndexedSlices(kernel[0], tf.range(8), tf.constant(SHAPE[1:]))
        gradients, numbers, remainder = compression.reduce(
            sums, [kernel * times, bias, rows], variables, [weight], weight, InOrder(), by
        )
        remainder.keep(tf.constant(True))
        return gradients[0] / times, gradients[1] / times, gradients[2].values, numbers[0]

    found: dict[str, list[Any]] = {"total": [], "error": [], "basis": [], "plain": []}
    for k, kind in enumerate(kinds):
        memory = compression.memory_at(0)
        found["basis"].append(memory.basis.numpy())
        total, *plain = step(tf.constant(_gradient(kind, k, here.rank)))
        found["total"].append(total.numpy().reshape(matrix_shape(SHAPE)))
        found["error"].append(memory.error.numpy())
        found["plain"].append([p.numpy() for p in plain])
    sums.close()
    return found


def _paper(whole: list[np.ndarray], basis: np.ndarray) -> np.ndarray:
    """Algorithm 1 of the paper, of what each rank has to send."""
    frame, _ = np.linalg.qr(sum(m @ basis for m in whole))
    return frame @ sum(m.T @ frame for m in whole).T


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        *(("mpi", size) for size in (1, 3)),
        pytest.param("horovod", 2, marks=[pytest.mark.horovod, pytest.mark.exhaustive]),
    ],
)
def test_updates_are_the_papers(ranks: Callable[..., Any], engine: str, size: int) -> None:
    kinds = ["random", "random", "zero", "random"]
    by_rank = ranks(size, group_mode(engine)).run(_updates, engine, kinds, None)
    weights = WEIGHTS[size]
    errors = [np.zeros(matrix_shape(SHAPE)) for _ in weights]
    given = np.zeros(matrix_shape(SHAPE))
    for k, kind in enumerate(kinds):
        ours = [w * _gradient(kind, k, rank).reshape(given.shape) for rank, w in enumerate(weights)]
        whole = [m + e for m, e in zip(ours, errors, strict=True)]
        total = _paper(whole, by_rank[0]["basis"][k])
        for found in by_rank:
            np.testing.assert_allclose(found["total"][k], total, rtol=1e-9, atol=1e-12)
            assert found["total"][k].tobytes() == by_rank[0]["total"][k].tobytes()
            assert found["basis"][k].tobytes() == by_rank[0]["basis"][k].tobytes()
        errors = [found["error"][k] for found in by_rank]
        # What was applied and what is left make up all that was given.
        given += sum(ours)
        applied = sum(by_rank[0]["total"][: k + 1])
        np.testing.assert_allclose(applied + sum(errors), given, rtol=1e-12, atol=1e-12)
        for bias, rows, number in (found["plain"][k] for found in by_rank):  # sent as they are
            expected = sum(w * (rank + 1.0) for rank, w in enumerate(weights))
            np.testing.assert_allclose(bias, expected, rtol=1e-15)
            assert rows.shape[0] % 8 == 0
            np.testing.assert_allclose(number, sum(w * w for w in weights), rtol=1e-6)
    assert max(np.abs(e).max() for e in errors) > 0.1  # they were compressed


@pytest.mark.parametrize("size", [2, more(3)])
def test_gradients_of_low_rank_are_exact_and_a_nan_is_forgotten(
    ranks: Callable[..., Any], size: int
) -> None:
    """Three ranks' gradients of rank 1 have a mean of rank 3, which is sent whole at once."""
    kinds = ["zero", "low", "low"] if size == 3 else ["zero", "low", "low", "nan", "low"]
    by_rank = ranks(size).run(_updates, "mpi", kinds, None)
    for k, kind in enumerate(kinds):
        mean = sum(w * _gradient(kind, k, rank) for rank, w in enumerate(WEIGHTS[size]))
        for found in by_rank:
            total, error = found["total"][k], found["error"][k]
            if kind == "nan":
                assert not np.isfinite(total).all()
                assert error.tobytes() == found["error"][k - 1].tobytes()
                assert found["basis"][k + 1].tobytes() == found["basis"][k].tobytes()
            else:
                np.testing.assert_allclose(total.reshape(SHAPE), mean, rtol=0, atol=1e-13)
                np.testing.assert_allclose(error, 0, atol=1e-13)


def test_a_scaled_loss_leaves_the_same_to_be_sent(ranks: Callable[..., Any]) -> None:
    group, kinds = ranks(2), ["random"] * 3
    plain, scaled = (group.run(_updates, "mpi", kinds, scale) for scale in (None, 2.0**12))
    for one, other in zip(plain, scaled, strict=True):
        for key in ("total", "error", "basis"):
            for a, b in zip(one[key], other[key], strict=True):
                np.testing.assert_array_equal(a, b)


def test_only_matrices_that_gain_are_compressed() -> None:
    assert is_compressed((64, 128), 4)
    assert is_compressed((3, 3, 16, 32), 4)
    assert not is_compressed((3, 3, 16, 16), 8)
    assert not is_compressed((8, 1024), 4)
    assert not is_compressed((1024,), 1)
    assert not is_compressed((), 1)


def test_what_is_left_stays_until_something_changes() -> None:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    model.compile("sgd")
    assert not set_powersgd(model, None)
    assert set_powersgd(model, 4)
    first = powersgd_of(model)
    assert not set_powersgd(model, 4)
    assert powersgd_of(model) is first
    model.compile("sgd")
    assert set_powersgd(model, 4)
    assert set_powersgd(model, 2)
    assert powersgd_of(model) is not first
    assert set_powersgd(model, None)
    assert powersgd_of(model) is None
