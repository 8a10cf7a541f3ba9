"""`trainer.xla` on several ranks: programs between the collectives, which overlap them."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer.state.trace_spans import COLLECTIVES, add_span
from tests.dist import cases
from tests.dist.cases import Case, compare, several, train

PARALLEL = {"backend": "data_parallel", "trainer__xla": "true"}
LATE = "late gradient"  # a lane of a trace


def _reference(chosen: list[tuple[str, str]]) -> list[Any]:
    return several(chosen, backend="local")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("engine", "size", "names"),
    [
        ("mpi", 2, ["regularised", "clipped_by_config"]),
        ("mpi", 2, ["masked_accumulated", "positions", "several_outputs"]),
        ("mpi", 3, ["sample_weights", "positions_accumulated"]),
        ("mpi", 4, ["synchronized_batch_norm"]),
        pytest.param("horovod", 2, ["masked_accumulated"], marks=pytest.mark.horovod),
    ],
    ids=lambda v: str(v) if not isinstance(v, list) else "",
)
def test_the_numbers_of_one_process(
    ranks: Callable[..., Any], engine: str, size: int, names: list[str]
) -> None:
    chosen = [(name, "adam" if i % 2 else "sgd") for i, name in enumerate(names)]
    group = ranks(size, "horovod") if engine == "horovod" else ranks(size)
    ours = group.run(several, chosen, **PARALLEL, backend__engine=engine, deadline=280)
    compare(_reference(chosen), ours, chosen, 1e-10, 1e-9)


def _recurrent(after: str = "") -> Case:
    """A loop; `after` it a layer that communicates its outputs before its backward pass."""
    import keras

    def build() -> Any:
        layers: list[Any] = [keras.Input((5, 3)), keras.layers.LSTM(8)]
        if after:
            layers.append(keras.layers.BatchNormalization(synchronized=True))
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(cases.optimizer("sgd"), "mse")
        return model

    random = np.random.default_rng(0)
    return Case(build, (random.normal(size=(41, 5, 3)), random.normal(size=(41, 2))))


def _twins() -> Case:
    """Two layers with equal gradients, which XLA computes once; each is summed for itself."""
    import keras

    def build() -> Any:
        x = keras.Input((8,))
        made = [keras.layers.Dense(4, kernel_initializer="ones", name=n)(x) for n in ("a", "b")]
        model = keras.Model(x, keras.layers.add(made))
        model.compile(cases.optimizer("sgd"), "mse")
        return model

    random = np.random.default_rng(0)
    return Case(build, (random.normal(size=(41, 8)), random.normal(size=(41, 4))))


OWN = {"loop": _recurrent, "loop, communicated": lambda: _recurrent("norm"), "twins": _twins}


def _train_own(name: str, **settings: Any) -> Any:
    return train(OWN[name](), **settings)


@pytest.mark.parametrize("name", OWN)
def test_loops_and_equal_gradients(ranks: Callable[..., Any], name: str) -> None:
    ours = ranks(2).run(_train_own, name, **PARALLEL, deadline=120)
    expected = _train_own(name, backend="local")
    compare([expected], [[outcome] for outcome in ours], [(name, "sgd")], 1e-10, 1e-9)


def _overlap(every: int, **settings: Any) -> list[bool]:
    """Train a model whose first layer's gradient is not there until a sum has begun.

    Args:
        every: local batches of an update; that of the last one waits.

    Returns:
        Of each update, whether a sum has begun within 10 s.
    """
    import keras
    import tensorflow as tf

    from ktrainer.distributed.mpi_gradients import MpiGradients

    begun, sum_bucket, calls = threading.Event(), MpiGradients.sum_bucket, [0]
    found: list[bool] = []

    @functools.wraps(sum_bucket)  # its name is in the trace
    def begins(self: Any, weight: Any, *arrays: Any, **named: Any) -> Any:
        begun.set()
        return sum_bucket(self, weight, *arrays, **named)

    def wait(x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        if calls[0] % every == 0:
            start = time.perf_counter()
            found.append(begun.wait(10))
            add_span(LATE, "wait for a sum", start, time.perf_counter())
            begun.clear()
        return x

    @tf.custom_gradient
    def waiting(x: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            waited = tf.numpy_function(wait, [upstream], upstream.dtype, stateful=False)
            return tf.ensure_shape(waited, upstream.shape)

        return tf.identity(x), gradient

    class Waiting(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return waiting(x)

    def build() -> Any:
        dense = keras.layers.Dense
        layers = [dense(512), Waiting(), dense(1024), dense(8)]
        model = keras.Sequential([keras.Input((1024,)), *layers])
        model.compile("sgd", "mse")
        return model

    MpiGradients.sum_bucket = begins  # type: ignore[method-assign]
    try:
        x = np.ones((16, 1024), "float32")
        case = Case(build, (x, x[:, :8]))
        case.settings = {"data.batch_size": 4, "trainer.epochs": 1, "health.verify": "off"}
        train(case, floatx="float32", backend="data_parallel", backend__bucket_mb=1, **settings)
    finally:
        MpiGradients.sum_bucket = sum_bucket  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("every", "settings"),
    [(1, {}), (1, {"trainer__xla": "true"}), (2, {"trainer__accumulate": 2})],
    ids=["plain", "xla", "accumulated"],
)
def test_sums_begin_before_the_last_gradient_is_there(
    ranks: Callable[..., Any], every: int, settings: dict[str, Any]
) -> None:
    for found in ranks(2).run(_overlap, every, **settings, deadline=120):
        assert found
        assert all(found), "no sum has begun before the last gradient was there"


def test_a_trace_shows_that_sums_overlap_the_backward_pass(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """The layer's bucket, whose gradient is late, is summed after all others."""
    keys = {"run__dir": str(tmp_path), "trainer__profile__steps": "1"}
    for found in ranks(2).run(_overlap, 1, **keys, deadline=120):
        assert all(found)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank]
        (there,) = (e["ts"] + e["dur"] for e in spans if e["cat"] == LATE)
        begins = sorted(e["ts"] for e in spans if e["cat"] == COLLECTIVES)
        assert begins[0] < there <= begins[-1]
