"""Tape and optimizer: the same loop in one process, and closed formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.dataparallel.helpers import caught, started
from tests.dist.small import more
from tests.processes import python

BATCH, STEPS = 12, 5
SIZES = [1, 2, more(3), more(4)]


def _data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(STEPS, BATCH, 6)), random.normal(size=(STEPS, BATCH, 2))


def _model() -> Any:
    import keras

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", use_bias=False),
            keras.layers.Dense(2),
        ]
    )


def _optimizer(clip: float | None = 0.05) -> Any:
    import keras

    return keras.optimizers.Adam(0.05, global_clipnorm=clip)


def _train(rank: int, size: int, wrap: Callable[..., Any], eager: bool) -> list[np.ndarray]:
    """A loop of one's own on this rank's rows of each batch; `wrap(optimizer)` distributes."""
    import tensorflow as tf

    model = _model()
    tape_of, optimizer = wrap(_optimizer())

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape_of(tape).gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    run = step if eager else tf.function(step)
    for x, y in zip(*_data(), strict=True):
        run(x[rank::size], y[rank::size])
    return [v.numpy() for v in [*model.trainable_variables, *optimizer.variables]]


def _plain() -> list[np.ndarray]:
    return _train(0, 1, lambda optimizer: (lambda tape: tape, optimizer), eager=False)


def _distributed(how: str, eager: bool) -> list[np.ndarray]:
    with started() as hvd:

        def wrap(optimizer: Any) -> Any:
            if how == "tape":
                return hvd.DistributedGradientTape, optimizer
            return (lambda tape: tape), hvd.DistributedOptimizer(optimizer)

        return _train(hvd.rank(), hvd.size(), wrap, eager)


def _branching(how: str) -> list[np.ndarray]:
    """An optimizer of one's own whose Python branch and loop AutoGraph turns into a graph."""
    import keras
    import tensorflow as tf

    class Careful(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            scale = tf.constant(0.0, tf.float64)
            for _ in tf.range(3):
                scale += 0.1
            if tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in grads]):
                scale *= 2.0
            super().apply([scale * g for g in grads], trainable_variables)

    def wrap(_: Any) -> Any:
        if how == "plain":
            return (lambda tape: tape), Careful(0.1)
        return (lambda tape: tape), hvd.DistributedOptimizer(Careful(0.1))

    if how == "plain":
        return _train(0, 1, wrap, eager=False)
    with started() as hvd:
        return _train(hvd.rank(), hvd.size(), wrap, eager=False)


def test_an_optimizer_that_branches_on_tensors(ranks: Callable[..., Any]) -> None:
    whole = _branching("plain")
    for values in ranks(2).run(_branching, "distributed"):
        for value, expected in zip(values, whole, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["tape", "optimizer"])
@pytest.mark.parametrize("eager", [False, more(True)])
def test_a_loop_is_that_of_one_process(
    ranks: Callable[..., Any], size: int, how: str, eager: bool
) -> None:
    (exact,) = ranks(1).run(_plain)
    every = ranks(size).run(_distributed, how, eager)
    for found in every:
        for value, wanted, first in zip(found, exact, every[0], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)
            assert value.tobytes() == first.tobytes()


def _structures() -> dict[str, Any]:
    import tensorflow as tf

    with started() as hvd:
        a, b, unused = (tf.Variable(float(n)) for n in (2, 3, 5))
        table = tf.Variable(tf.ones([4, 2]))
        scale = hvd.rank() + 1.0
        with tf.GradientTape(persistent=True) as tape:
            y = scale * a * b
            z = scale * a * a
            rows = tf.reduce_sum(tf.gather(table, [0, hvd.rank(), hvd.rank()]))
        tape = hvd.DistributedGradientTape(tape)
        assert isinstance(tape, tf.GradientTape)
        nested = tape.gradient(y, {"a": a, "rest": (b, [unused])})
        found = {
            "nested": [nested["a"].numpy(), nested["rest"][0].numpy(), nested["rest"][1][0]],
            "again": tape.gradient(z, a).numpy(),
            "zero": tape.gradient(z, [b], unconnected_gradients="zero")[0].numpy(),
        }
        slices = tape.gradient(rows, table)
        assert isinstance(slices, tf.IndexedSlices)
        found["slices"] = tf.convert_to_tensor(slices).numpy()
        dense = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(rows, table)
        assert isinstance(dense, tf.Tensor)
        found["dense"] = dense.numpy()
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as whole:
            y = scale * a
        found["sum"] = whole.gradient(y, a).numpy()
        found["refused"] = [
            caught(lambda: hvd.DistributedGradientTape(tape, device_dense="/gpu:0")),
            caught(lambda: hvd.DistributedGradientTape(tape, device_sparse="/cpu:0")),
            caught(lambda: hvd.DistributedOptimizer(_optimizer(), bucket_cap_mb=0.00001)),
            caught(lambda: hvd.DistributedOptimizer(lambda: None)),
            caught(lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(_optimizer()))),
        ]
        return found


def test_sources_come_back_in_their_structure(ranks: Callable[..., Any]) -> None:
    for found in ranks(2).run(_structures):
        assert found["nested"] == [4.5, 3.0, None]
        assert found["again"] == 6.0
        assert found["zero"] == 0.0
        table = np.zeros((4, 2))
        table[0], table[1] = 2, 1  # (1 + 1 + 1 + 1) / 2, (1 + 1) / 2
        np.testing.assert_array_equal(found["slices"], table)
        np.testing.assert_array_equal(found["dense"], table)
        assert found["sum"] == 3.0
        dense, sparse, bucket, other, twice = found["refused"]
        assert dense.startswith("ConfigError: device_dense:")
        assert sparse.startswith("ConfigError: device_sparse:")
        assert "multiple of 128" in bucket
        assert "takes a Keras 3 optimizer" in other
        assert "distributed already" in twice


def _penalties() -> list[str]:
    """What is said of an outer tape that differentiates gradients, and of one that does not."""
    import tensorflow as tf

    with started() as hvd:
        weight = tf.Variable(2.0)

        def slope(factor: float) -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = weight**3
                gradient = hvd.DistributedGradientTape(inner).gradient(loss, weight)
                target = factor * tf.stop_gradient(gradient) * weight
                target += 0.0 if factor else gradient**2
            return outer.gradient(target, weight)

        assert float(slope(1.0)) == float(tf.function(slope)(1.0)) == 12
        return [caught(lambda: slope(0.0)), caught(lambda: tf.function(slope)(0.0))]


def test_reduced_gradients_have_no_gradient(ranks: Callable[..., Any]) -> None:
    for said in ranks(2).run(_penalties):
        assert all("inner gradients, such as those of a penalty" in each for each in said)


def _positions(more: int, distributed: bool) -> list[np.ndarray]:
    """Updates of a table of positions, of which each rank looks up `more` than the one before."""
    import keras
    import tensorflow as tf

    with started() as hvd:
        table = keras.Variable(np.ones((6, 2)), dtype="float64")
        optimizer = keras.optimizers.Adam(0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        lengths = [4 + more * hvd.rank()] if distributed else sorted({4, 4 + more})

        @tf.function
        def step(scale: Any) -> None:
            with tf.GradientTape() as tape:
                sums = [tf.reduce_sum(tf.gather(table.value, tf.range(n))) for n in lengths]
                loss = scale * sum(sums) / len(lengths)
            optimizer.apply([tape.gradient(loss, table.value)], [table])

        for scale in (1.0, 0.1):
            step(tf.constant(scale, tf.float64))
        return [v.numpy() for v in [table, *optimizer.variables]]


@pytest.mark.parametrize("more", [0, 1])
def test_rows_looked_up_once_a_batch_are_summed(ranks: Callable[..., Any], more: int) -> None:
    """As in one process, where ranks look up as many; else the rows of all are gathered."""
    (truth,) = ranks(1).run(_positions, more, False)
    for found in ranks(2).run(_positions, more, True):
        for value, wanted in zip(found, truth, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6)


def _aggregated(passes: int, average: bool, eager: bool) -> list[np.ndarray]:
    import tensorflow as tf

    with started() as hvd:
        model = _model()
        optimizer = hvd.DistributedOptimizer(
            _optimizer(),
            backward_passes_per_step=passes,
            average_aggregated_gradients=average,
        )

        def one(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = one if eager else tf.function(one)
        for x, y in zip(*_data(), strict=True):
            for part in range(passes):
                chosen = slice(hvd.rank() * passes + part, None, hvd.size() * passes)
                run(x[chosen], y[chosen])
        return [v.numpy() for v in [*model.trainable_variables, *optimizer.variables]]


@pytest.mark.parametrize("eager", [False, more(True)])
def test_passes_are_added_up_before_the_ranks(ranks: Callable[..., Any], eager: bool) -> None:
    (exact,) = ranks(1).run(_plain)
    for found in ranks(2).run(_aggregated, 2, True, eager):
        for value, wanted in zip(found, exact, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


def _fit(folder: str, precision: str) -> dict[str, Any]:
    import keras
    import tensorflow as tf

    with started() as hvd:
        keras.config.set_dtype_policy(precision)
        keras.utils.set_random_seed(hvd.rank())  # the callback makes the weights equal
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="out")])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        devices = tf.config.list_physical_devices
        tf.config.list_physical_devices = lambda kind=None: [
            *devices(kind), tf.config.PhysicalDevice("/gpu:0", "GPU"),
        ]  # fmt: skip
        try:
            model.compile(optimizer, "mse")  # with a GPU, Keras' "auto" is XLA
        finally:
            tf.config.list_physical_devices = devices
        x, y = (array.reshape(-1, array.shape[-1]) for array in _data())
        rank, size = hvd.rank(), hvd.size()
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x[rank::size], y[rank::size], 4, shuffle=False, verbose=0, callbacks=[start])
        if rank == 0:
            model.save(f"{folder}/model.keras")
        return {
            "weights": [v.numpy() for v in model.variables],
            "xla": model.jit_compile,
            "kind": type(model.optimizer).__name__,
            "iterations": int(model.optimizer.iterations),
        }


@pytest.mark.parametrize("precision", ["float64", "mixed_float16"])
def test_fit_on_each_rank(ranks: Callable[..., Any], tmp_path: Any, precision: str) -> None:
    every = ranks(2).run(_fit, str(tmp_path), precision)
    assert all(found["weights"][0].any() for found in every)
    for mine, other in zip(every[0]["weights"], every[1]["weights"], strict=True):
        assert mine.tobytes() == other.tobytes()
    assert not every[0]["xla"]
    skipped = 8 - every[0]["iterations"]  # by the loss scale, on both ranks alike
    assert every[1]["iterations"] == every[0]["iterations"]
    assert skipped == 0 if precision == "float64" else skipped < 4
    assert every[0]["kind"] == ("SGD" if precision == "float64" else "LossScaleOptimizer")


LOAD = """
import sys
sys.modules["ktrainer"] = None  # not installed
import keras
model = keras.models.load_model("model.keras")
assert type(model.optimizer) is keras.optimizers.SGD, type(model.optimizer)
assert "apply" not in vars(model.optimizer)
assert int(model.optimizer.iterations) == 8
model.fit(keras.ops.zeros((1, 6)), keras.ops.zeros((1, 2)), verbose=0)
"""


def test_a_saved_model_loads_without_ktrainer(ranks: Callable[..., Any], tmp_path: Any) -> None:
    ranks(2).run(_fit, str(tmp_path), "float64")
    done = python("-c", LOAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def _apply(optimizer: Any, variable: Any, gradient: Any) -> None:
    optimizer.apply([gradient], [variable])


def _overflow() -> list[Any]:
    import keras
    import tensorflow as tf

    with started() as hvd:
        variable = keras.Variable(np.ones(2, "float32"))
        found = []
        for outer in (True, False):
            optimizer = keras.optimizers.SGD(0.5)
            if outer:
                optimizer = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer))
            else:
                optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))
            step = tf.function(partial(_apply, optimizer, variable), autograph=False)
            optimizer.build([variable])
            bad = np.inf if hvd.rank() == 1 else 1.0  # overflows on one rank only
            step(tf.constant([bad, 1.0]))
            step(tf.constant([2.0, 4.0]) * float(optimizer.dynamic_scale))
            found.append((variable.numpy().tolist(), float(optimizer.dynamic_scale)))
        return found


def test_an_overflow_on_one_rank_skips_the_update_on_all(ranks: Callable[..., Any]) -> None:
    expected = [([0.0, -1.0], 2.0**14), ([-1.0, -3.0], 2.0**14)]
    assert ranks(2).run(_overflow) == [expected, expected]


def _sums_over_new_communicators() -> list[float]:
    """A sum of a compiled function before and after the channel's communicators were replaced, as
    they are when ranks are lost or join."""
    import tensorflow as tf

    from ktrainer.dataparallel.state import group_of

    with started() as hvd:
        total = tf.function(lambda: hvd.allreduce(tf.ones([], tf.float64), op=hvd.Sum))
        found, group = [float(total())], group_of(None)
        for channel in (group.gradients, group.others):
            old = channel.sums._communicators.comm
            channel.sums.open()
            old.Free()
        return [*found, float(total())]


def test_compiled_functions_sum_over_the_ranks_now(ranks: Callable[..., Any]) -> None:
    for size in (2, 3):
        assert ranks(size).run(_sums_over_new_communicators) == [[size, size]] * size
