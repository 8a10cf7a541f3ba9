"""Data parallel training gives the numbers of one process, on 2, 3 and 4 ranks, both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.dist import cases
from tests.dist.cases import CASES, Case, Outcome, compare, several, train
from tests.dist.small import ENGINES, group_mode

Cases = list[tuple[str, str]]

# Two ranks run every case; of three and four ranks, and of Horovod, some are enough.
NAMES = list(CASES)
TWO = cases.with_optimizers(NAMES)
ONE = [("masked_accumulated", "sgd")]
SLICES = ("positions_accumulated", "adamw")  # its gradients are squared one by one
CHOSEN = [
    (1, ONE),
    (2, [*TWO, ("masked_gru", "adamw")]),
    (3, [("plain", "adamw"), ("sample_weights", "sgd"), SLICES]),
    (4, [("plain", "sgd"), ("class_weights", "adamw")]),
]
HOROVOD = [
    (2, [("plain", "adamw"), ("masked_accumulated", "sgd"), ("several_outputs", "sgd")]),
    (3, [SLICES]),
    (4, [("masked", "adamw")]),
]
_references: dict[tuple[str, str], list[Outcome]] = {}


def reference(chosen: list[tuple[str, str]], floatx: str, **settings: Any) -> list[Outcome]:
    """What one process gives; each case once a session."""
    outcomes = []
    for case in chosen:
        key = (f"{case}{settings}", floatx)
        if key not in _references:
            _references[key] = several([case], floatx, backend="local", **settings)
        outcomes.append(_references[key][0])
    return outcomes


@pytest.mark.quick("3-chosen2")
@pytest.mark.parametrize(("size", "chosen"), CHOSEN)
def test_float64_weights_equal_one_process(
    ranks: Callable[..., Any], size: int, chosen: Cases
) -> None:
    words = {"backend": "data_parallel", "health__verify": "auto" if size in (2, 3) else "off"}
    ours = ranks(size).run(several, chosen, **words, backend__engine="mpi", deadline=280)
    compare(reference(chosen, "float64"), ours, chosen, weights=1e-10, logs=1e-9)


@pytest.mark.exhaustive
def test_float32_weights_equal_one_process_to_round_off(ranks: Callable[..., Any]) -> None:
    chosen = [("synchronized_batch_norm", "sgd"), ("masked", "adamw")]
    ours = ranks(3).run(several, chosen, "float32", backend="data_parallel", deadline=200)
    compare(reference(chosen, "float32"), ours, chosen, weights=1e-5, logs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.horovod
@pytest.mark.parametrize(("size", "chosen"), HOROVOD)
def test_horovod_equals_one_process(ranks: Callable[..., Any], size: int, chosen: Cases) -> None:
    ours = ranks(size, "horovod").run(
        several, chosen, backend="data_parallel", backend__engine="horovod", deadline=280
    )
    compare(reference(chosen, "float64"), ours, chosen, weights=1e-10, logs=1e-9)


def _tiny_batches(name: str = "sgd") -> Case:
    """Batches of 2, then 1: with 3 ranks some have nothing to do."""
    x, y = cases.vectors()
    case = cases.synchronized_batch_norm(name)
    case.data = (x[:41], y[:41])
    case.settings = {"data.batch_size": 2, "trainer.epochs": 2}
    return case


def _train_tiny(**settings: Any) -> Outcome:
    return train(_tiny_batches(), **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
def test_batches_smaller_than_the_world_are_exact(ranks: Callable[..., Any], engine: str) -> None:
    expected = _train_tiny(backend="local")
    group = ranks(3, group_mode(engine))
    settings = {"backend": "data_parallel", "backend__engine": engine, "world__deadline": 30}
    ours = group.run(_train_tiny, **settings)
    compare([expected], [[o] for o in ours], [("tiny batches", "sgd")], 1e-10, 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"backend__bucket_mb": 0.0001},
        {"backend__sparse_as_dense": "true"},
        {"trainer__steps_per_call": 3},
        {"trainer__xla": "true"},
    ],
    ids=lambda s: next(iter(s)),
)
def test_options_do_not_change_the_numbers(ranks: Callable[..., Any], settings: Any) -> None:
    chosen = [("masked", "sgd")]
    ours = ranks(2).run(several, chosen, backend="data_parallel", **settings, deadline=150)
    compare(reference(chosen, "float64"), ours, chosen, 1e-10, 1e-9)


def _train_uneven(**settings: Any) -> Outcome:
    """Batches of 32, 32 and 31: two ranks have 16, 16, 16 and 16, 16, 15 examples."""
    x, y = cases.vectors()
    case = cases.plain("sgd")
    case.data, case.validation = (x[:95], y[:95]), None
    case.settings = {"trainer.epochs": 2}
    return train(case, **settings)


@pytest.mark.quick("mpi")
@pytest.mark.parametrize("engine", ENGINES)
def test_several_steps_a_call_of_which_one_rank_has_fewer_examples(
    ranks: Callable[..., Any], engine: str
) -> None:
    """One rank then compiles the steps into one, the other does not."""
    expected = _train_uneven(backend="local")
    settings = {"backend__engine": engine, "trainer__steps_per_call": 3, "world__deadline": 30}
    ours = ranks(2, group_mode(engine)).run(
        _train_uneven, backend="data_parallel", **settings, deadline=120
    )
    compare([expected], [[o] for o in ours], [("uneven", "sgd")], 1e-10, 1e-9)


@pytest.mark.exhaustive
def test_fp16_on_the_wire_is_close_and_equal_on_all_ranks(ranks: Callable[..., Any]) -> None:
    chosen = [("plain", "sgd"), ("masked", "sgd")]
    settings = {"backend": "data_parallel", "backend__compression": "fp16"}
    ours = ranks(3).run(several, chosen, "float32", **settings)
    largest = compare(reference(chosen, "float32"), ours, chosen, 5e-2, 5e-2)
    assert min(largest.values()) > 1e-6  # it did go through 16 bits


def _train_normalised(**settings: Any) -> Outcome:
    """Statistics of the data alone, and losses that are beyond float16."""
    import keras

    x, _ = cases.vectors()

    def build() -> Any:
        norm = keras.layers.BatchNormalization(center=False, scale=False, synchronized=True)
        model = keras.Sequential([keras.Input((8,)), norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    case = Case(build, (x + 1.0, np.full((len(x), 1), 400.0)))
    return train(case, floatx="float32", **settings)


@pytest.mark.quick("mpi")
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_alone_are_compressed(ranks: Callable[..., Any], engine: str) -> None:
    """A step moves a moving average by less than 16 bits tell; and `skip` looks at the loss."""
    group = ranks(2, group_mode(engine))
    settings = {"backend": "data_parallel", "backend__engine": engine, "health__nan": "skip"}
    exact, ours = (
        group.run(_train_normalised, **settings, backend__compression=kind)[0]
        for kind in ("none", "fp16")
    )
    moving = [name for name in exact.weights if "moving" in name]
    assert len(moving) == 2
    for name in moving:
        np.testing.assert_array_equal(ours.weights[name], exact.weights[name])
    np.testing.assert_allclose(ours.history["loss"], exact.history["loss"], rtol=1e-3)
    assert exact.history["loss"][0] > float(np.finfo(np.float16).max)


def _train_logarithms(**settings: Any) -> Outcome:
    """Two synchronized normalizations, one with a mask; the second rank has no rows."""
    import keras
    import tensorflow as tf

    from ktrainer import distributed

    class Logarithm(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.math.log(x)

    def normalized(x: Any) -> Any:
        return keras.layers.Dense(1)(keras.layers.BatchNormalization(synchronized=True)(x))

    def build() -> Any:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3, 2))
        x = Logarithm()(inputs)
        model = keras.Model(inputs, normalized(x) + normalized(keras.layers.Masking()(x)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    x = np.random.default_rng(0).uniform(1.0, 2.0, (8, 3, 2))
    x[:2, 2] = 1.0  # masked: its logarithm is 0
    rows = tf.data.Dataset.from_tensor_slices((x, x[..., :1]))
    data = rows.take(0 if distributed.current_world().rank else 8).batch(4)
    return train(Case(build, data, settings={"data.batch": "per_worker"}), **settings)


def test_logarithms_of_padding_leave_statistics_alone(ranks: Callable[..., Any]) -> None:
    """Padding is zeros on a rank that never has a batch."""
    expected = _train_logarithms(backend="local")
    ours = ranks(2).run(_train_logarithms, backend="data_parallel")
    compare([expected], [[each] for each in ours], [("logarithms", "sgd")], 1e-10, 1e-9)


def _train_padded_part(**settings: Any) -> Outcome:
    import keras

    def build() -> Any:
        norm = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-3)
        model = keras.Sequential([keras.Input((1,)), norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    x = np.array([[1.0], [3.0], [10.0], [30.0], [100.0]])
    case = Case(build, (x, x), settings={"data.shuffle": False, "trainer.epochs": 1})
    return train(case, **settings)


def test_padding_of_a_part_leaves_statistics_alone(ranks: Callable[..., Any]) -> None:
    """Of an update's two parts the second has one row, which the first rank gets: the statistics
    of the other are those of its first part, and count with its share of the rows."""
    settings = {"data__batch_size": 4, "trainer__accumulate": 2, "backend": "data_parallel"}
    ours = ranks(2).run(_train_padded_part, **settings)[0]
    (mean,) = (value for name, value in ours.weights.items() if "moving_mean" in name)
    (variance,) = (value for name, value in ours.weights.items() if "moving_variance" in name)
    first, second = 0.9 * (0.1 * 2.0) + 0.1 * 100.0, 0.1 * 20.0
    np.testing.assert_allclose(mean, [(3 * first + 2 * second) / 5], rtol=1e-12)
    first, second = 0.9 * (0.9 + 0.1 * 1.0), 0.9 + 0.1 * 100.0
    np.testing.assert_allclose(variance, [(3 * first + 2 * second) / 5], rtol=1e-12)


def test_sum_is_size_times_average(ranks: Callable[..., Any]) -> None:
    """With `op: sum` a learning rate divided by the number of ranks gives the same weights."""

    expected = _with_rate(0.05, backend="local")
    ours = ranks(2).run(_with_rate, 0.025, backend="data_parallel", backend__op="sum")
    for outcome in ours:
        for i, variable in enumerate(expected.weights):
            if "kernel" in variable and "momentum" not in variable and "sgd" not in variable:
                a, b = list(expected.weights.values())[i], list(outcome.weights.values())[i]
                np.testing.assert_allclose(a, b, rtol=1e-9)


def _with_rate(rate: float, **settings: Any) -> Outcome:
    import keras

    case = cases.plain("sgd")
    build = case.build

    def slower() -> Any:
        model = build()
        model.compile(keras.optimizers.SGD(rate), model.loss)
        return model

    case.build = slower
    return train(case, **settings)
