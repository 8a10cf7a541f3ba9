"""Ranks that do different things get an error that names both, and never each other's numbers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataparallel.helpers import caught, modes, started


def _ones(*shape: int, dtype: str = "float32") -> Any:
    import tensorflow as tf

    return tf.ones(shape, dtype)


def _pairs(hvd: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What rank 0 does, and what the others do."""
    reduce, outside = hvd.allreduce, hvd.oob_allreduce
    return {
        "shape": (lambda: reduce(_ones(2, 3), 0, 1), lambda: reduce(_ones(3, 2), 0, 1)),
        "size": (lambda: reduce(_ones(2), 0, 1), lambda: reduce(_ones(3), 0, 1)),
        "dtype": (
            lambda: outside(_ones(2, dtype="int32")), lambda: outside(_ones(2, dtype="float32")),
        ),
        "op": (
            lambda: reduce(_ones(2), op=hvd.ReduceOp.SUM),
            lambda: reduce(_ones(2), op=hvd.ReduceOp.MAX),
        ),
        "order": (lambda: reduce(_ones(2), 0, 2), lambda: reduce(_ones(2), 1, 2)),
        "compression": (
            lambda: reduce(_ones(2), compression=hvd.Compression.fp16), lambda: reduce(_ones(2)),
        ),
        "call": (lambda: outside(_ones(2)), lambda: hvd.broadcast(_ones(2), 0)),
        "root": (lambda: hvd.broadcast(_ones(2), 0), lambda: hvd.broadcast(_ones(2), 1)),
        "name": (lambda: reduce(_ones(2), name="a"), lambda: reduce(_ones(2), name="b")),
        "rows": (lambda: hvd.allgather(_ones(2, 3)), lambda: hvd.allgather(_ones(2, 4))),
        "many": (
            lambda: hvd.grouped_allreduce([_ones(k + 1) for k in range(9)]),
            lambda: hvd.grouped_allreduce([_ones(k + 1 + (k == 6)) for k in range(9)]),
        ),
    }  # fmt: skip


SAID = {
    "shape": ["float32 [2, 3]", "float32 [3, 2]"],
    "size": ["float32 [2]", "float32 [3]"],
    "dtype": ["int32 [2]", "float32 [2]"],
    "op": ["(sum)", "(max)"],
    "order": ["parameter 0 of 2", "parameter 1 of 2"],
    "compression": ["fp16", "none"],
    "call": ["oob_allreduce", "broadcast from rank 0"],
    "root": ["from rank 0", "from rank 1"],
    "name": ["'a'", "'b'"],
    "rows": ["[?, 3]", "[?, 4]"],
    "many": ["float32 [7]", "float32 [8]"],
}


def _disagree() -> dict[Any, Any]:
    found = {}
    with started() as hvd:
        for name, (first, others) in _pairs(hvd).items():
            for mode, run in modes(first if hvd.rank() == 0 else others).items():
                found[name, mode] = caught(run)
                found[name, mode, "after"] = float(hvd.allreduce(float(hvd.rank())))
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("size", [2, 3], ids=str)
def test_the_error_names_both_ranks_and_what_each_had(ranks: Callable[..., Any], size: int) -> None:
    for found in ranks(size).run(_disagree):
        for name, (ours, theirs) in SAID.items():
            for mode in ("eager", "traced"):
                error = found[name, mode]
                assert "DivergenceError" in error, (name, mode, error)
                for part in ("rank 0 is in", "rank 1 is in", ours, theirs):
                    assert part in error, (name, mode, error)
                assert found[name, mode, "after"] == (size - 1) / 2  # communication still works


def _retrace() -> str:
    """A last batch that is smaller on one rank: only that rank traces again."""
    import tensorflow as tf

    with started() as hvd:
        step = tf.function(lambda x: hvd.allreduce(x, 0, 1))
        assert float(tf.reduce_sum(step(_ones(8)))) == 8
        assert float(tf.reduce_sum(step(_ones(8)))) == 8
        return caught(lambda: step(_ones(8 - hvd.rank())))


def test_a_function_that_one_rank_traces_again_is_noticed(ranks: Callable[..., Any]) -> None:
    for error in ranks(2).run(_retrace):
        assert "float32 [8]" in error
        assert "float32 [7]" in error


def _gradients_of_others() -> list[str]:
    """Ranks lack the gradients of different variables, of one shape; or of all."""
    import keras
    import tensorflow as tf

    a, b = tf.Variable(1.0), tf.Variable(1.0)
    said = []
    with started() as hvd:
        first = hvd.rank() == 0
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([keras.Variable(1.0), keras.Variable(1.0)])

        def tape() -> Any:
            with tf.GradientTape() as found:
                loss = 2 * a if first else 10 * b
            return hvd.DistributedGradientTape(found).gradient(loss, [a, b])

        def none() -> Any:
            with tf.GradientTape() as found:
                loss = 2 * a if first else tf.constant(1.0)
            return hvd.DistributedGradientTape(found).gradient(loss, [a])

        def update() -> None:
            optimizer.apply([tf.ones([]), None] if first else [None, tf.ones([])])

        for function in (tape, none, update):
            for run in modes(function).values():
                said.append(caught(run))
                assert float(hvd.oob_allreduce(1.0)) == 1
    return said


def test_gradients_of_other_variables_are_never_added(ranks: Callable[..., Any]) -> None:
    for said in ranks(2).run(_gradients_of_others):
        for error in said:
            assert "DivergenceError" in error
            assert "variables those of" in error


def _wrong_splits() -> list[str]:
    import tensorflow as tf

    with started() as hvd:
        first = hvd.rank() == 0
        one = caught(lambda: hvd.alltoall(_ones(3), [1, 1 + (not first)]))
        every = caught(lambda: hvd.alltoall(_ones(3), [1, 1]))
        uneven = caught(lambda: hvd.alltoall(_ones(3)))
        send = tf.function(lambda x, splits: hvd.alltoall(x, splits)[0])
        send = send.get_concrete_function(*[tf.TensorSpec([None], t) for t in ("float32", "int32")])
        given = (_ones(3), [1, 2]) if first else (_ones(0), [])
        none = caught(lambda: send(given[0], tf.constant(given[1], tf.int32)))
        return [one, every, uneven, none, caught(lambda: hvd.allreduce(1.0))]


def test_splits_that_do_not_add_up_are_named_on_all_ranks(ranks: Callable[..., Any]) -> None:
    for one, every, uneven, none, after in ranks(2).run(_wrong_splits):
        assert "DivergenceError" in one
        assert "splits [1, 1] do not add up to its 3 rows" in one
        assert "DataError" in every
        assert "DataError" in uneven
        assert "splits [] do not add up to its 0 rows for 2 ranks" in none
        assert after == ""


def _variables() -> list[Any]:
    import keras

    with started() as hvd:
        other = keras.layers.Dense(3 if hvd.rank() == 0 else 4)
        other.build((None, 2))
        error = caught(lambda: hvd.broadcast_variables(other.variables, 0))
        unbuilt = caught(lambda: hvd.broadcast_variables(keras.optimizers.SGD(), 0))
        strange = caught(lambda: hvd.broadcast_variables([1.0], 0))
        return [error, unbuilt, strange]


def test_other_variables_are_named(ranks: Callable[..., Any]) -> None:
    for different, unbuilt, strange in ranks(2).run(_variables):
        assert "DivergenceError: ranks hold different variables" in different
        assert "ModelError" in unbuilt
        assert "DataError" in strange


def _late(traced: bool, told: Path) -> tuple[str, str, float]:
    """Rank 1 does not come until rank 0 has complained."""
    import tensorflow as tf

    import ktrainer.dataparallel as hvd

    hvd.init(deadline=3)
    reduce = partial(hvd.allreduce, tf.ones([2]), 1, 4)
    start = time.monotonic()
    if hvd.rank() == 1:
        while not told.exists() and time.monotonic() - start < 20:
            time.sleep(0.02)
        return "", "", 0.0
    error = caught(tf.function(reduce, autograph=False) if traced else reduce)
    after, seconds = caught(lambda: hvd.oob_allreduce(1.0)), time.monotonic() - start
    told.touch()
    return error, after, seconds


@pytest.mark.exhaustive
@pytest.mark.parametrize("traced", [False, True])
def test_a_missing_rank_is_named_within_the_deadline(
    ranks: Callable[..., Any], tmp_path: Path, traced: bool
) -> None:
    group = ranks(2, f"late {traced}")
    error, after, seconds = group.run(_late, traced, tmp_path / "told")[0]
    assert "DeadlineExceeded" in error
    assert "waited 3 s" in error
    assert "allreduce of parameter 1 of 4 (average): float32 [2]" in error
    assert "rank 1" in error
    assert "init(deadline=SECONDS)" in error
    assert "can no longer communicate" in after
    assert seconds < 8


def _crossed() -> list[float]:
    """One thread in allreduce, another in oob_allreduce; each rank begins with another one."""
    with started() as hvd:
        found: dict[str, float] = {}
        # Rank 0's allreduce begins first, and ends after rank 1's, which calls it last.

        def gradient() -> None:
            found["gradient"] = float(hvd.allreduce(1.0 + hvd.rank(), 0, 1))

        def other() -> None:
            found["other"] = float(hvd.oob_allreduce(3.0 + hvd.rank()))

        if hvd.rank() == 0:
            thread = threading.Thread(target=gradient)
            thread.start()
            time.sleep(0.2)
            other()
            thread.join()
        else:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            gradient()
        return [found["gradient"], found["other"]]


def test_calls_in_another_order_on_each_rank_end(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_crossed) == [[1.5, 3.5]] * 2


def _crossed_in_a_function() -> list[float]:
    """Traced in another order on each rank."""
    import tensorflow as tf

    with started() as hvd:

        @tf.function(autograph=False)
        def step(value: Any) -> Any:
            if hvd.rank() == 0:
                gradient = hvd.allreduce(value, 0, 1)
                return gradient, hvd.oob_allreduce(value + 2)
            other = hvd.oob_allreduce(value + 2)
            return hvd.allreduce(value, 0, 1), other

        found = [step(tf.constant(1.0 + hvd.rank())) for _ in range(20)][-1]
        return [float(x) for x in found]


def test_calls_in_another_order_in_a_function_end(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_crossed_in_a_function) == [[1.5, 3.5]] * 2


def _threads() -> int:
    """Two threads of each rank make equal calls on one channel, in any order."""
    with started() as hvd:
        wrong = []

        def many() -> None:
            for _ in range(50):
                total = hvd.allreduce(np.full(5, 3.0), op=hvd.Sum).numpy()
                wrong.extend(total[total != 6])

        threads = [threading.Thread(target=many) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(wrong)


def test_calls_of_threads_do_not_mix(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_threads) == [0, 0]


def _xla() -> list[str]:
    import tensorflow as tf

    with started() as hvd:
        compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True, autograph=False)
        return [caught(lambda: compiled(tf.ones([2])))]


def test_xla_is_refused(ranks: Callable[..., Any]) -> None:
    for (error,) in ranks(2).run(_xla):
        assert error.startswith("ModelError")
        assert "jit_compile=False" in error
