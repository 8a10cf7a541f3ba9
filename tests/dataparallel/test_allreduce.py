"""`allreduce`, `oob_allreduce` and `grouped_allreduce` against NumPy, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.dataparallel.helpers import caught, modes, started, values
from tests.dist.small import more

SHAPES = [(), (3, 1, 4), (0, 2)]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int32", "int64"]
OPS = ["AVERAGE", "SUM", "MIN", "MAX", "PRODUCT"]
SIZES = [1, 2, more(3), more(4)]


def _reductions(function: str) -> dict[Any, Any]:
    """Every operation on every type and shape; eagerly and traced."""
    found = {}
    with started() as hvd:
        call = getattr(hvd, function)
        for op in OPS:
            for dtype in DTYPES:
                for shape in SHAPES:
                    value = values(hvd.rank(), shape, dtype)
                    runs = modes(partial(call, op=hvd.ReduceOp[op]))
                    if dtype not in ("float64", "bfloat16"):  # tracing takes a while
                        del runs["traced"]
                    for mode, reduce in runs.items():
                        result = reduce(value)
                        assert result.shape == shape, (op, dtype, shape, mode)
                        found[op, dtype, shape, mode] = result.numpy()
    return found


def _exact(op: str, every: list[np.ndarray]) -> np.ndarray:
    stacked = np.stack(every).astype(np.float64)
    if op == "AVERAGE" and every[0].dtype.kind == "i":
        return np.sum(stacked, 0) // len(every)
    numpy_op = {"AVERAGE": np.mean, "SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}
    return numpy_op[op](stacked, axis=0)


@pytest.mark.parametrize("function", ["allreduce", "oob_allreduce"])
@pytest.mark.parametrize("size", SIZES)
def test_a_reduction_is_numpys(ranks: Callable[..., Any], size: int, function: str) -> None:
    every = ranks(size).run(_reductions, function, deadline=120)
    for (op, dtype, shape, mode), result in every[0].items():
        what = f"{op} of {dtype} {shape}, {mode}"
        assert all(found[op, dtype, shape, mode].tobytes() == result.tobytes() for found in every)
        assert result.dtype == np.dtype(dtype), what
        given = [values(rank, shape, dtype) for rank in range(size)]
        exact = _exact(op, given)
        if np.dtype(dtype).kind == "i":
            np.testing.assert_array_equal(result, exact, what)
            continue
        eps = float(ml_dtypes.finfo(dtype).eps)
        if op == "PRODUCT":
            scale = np.abs(exact) * size
        else:
            scale = np.abs(given).astype(np.float64).sum(0)
        assert np.all(np.abs(result.astype(np.float64) - exact) <= 2 * eps * scale), what


def _edges() -> list[Any]:
    with started() as hvd:
        rank, nan = hvd.rank(), float("nan")
        averages = [
            hvd.allreduce(np.array([n, n - rank], dtype))
            for n, dtype in ((200, "uint8"), (100, "int8"), (2**63 - 1, "int64"), (-7, "int64"))
        ]
        values = np.array([1.0, nan if rank else -2.0, -0.0 if rank else 0.0], "float32")
        return [
            *averages,
            *(
                hvd.allreduce(values.astype(t), op=op)
                for t in DTYPES[:2]
                for op in (hvd.Min, hvd.Max)
            ),
        ]


def test_averages_do_not_overflow_and_nan_is_not_lost(ranks: Callable[..., Any]) -> None:
    every = [[each.numpy() for each in found] for found in ranks(2).run(_edges)]
    for ours, theirs in zip(*every, strict=True):
        assert ours.tobytes() == theirs.tobytes()
    averages, extremes = every[0][:4], every[0][4:]
    expected = [[200, 199], [100, 99], [2**63 - 1, 2**63 - 2], [-7, -8]]
    assert [each.tolist() for each in averages] == expected
    for found in extremes:
        assert found[0] == 1
        assert np.isnan(found[1])


def _compressed() -> dict[Any, Any]:
    found = {}
    with started() as hvd:
        for call in (hvd.allreduce, hvd.oob_allreduce):
            for compression in ("fp16", "bf16"):
                for mode, reduce in modes(
                    partial(call, compression=hvd.Compression[compression])
                ).items():
                    value = values(hvd.rank(), (40,), "float32")
                    found[call.__name__, compression, mode] = reduce(value).numpy()
    return found


def test_16_bits_on_the_wire_are_summed_in_float32(ranks: Callable[..., Any]) -> None:
    every = ranks(2).run(_compressed)
    for (call, compression, mode), result in every[0].items():
        wire = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}[compression]
        halves = [(values(rank, (40,), "float32") / 2).astype(wire) for rank in range(2)]
        total = sum(half.astype(np.float32) for half in halves).astype(wire).astype(np.float32)
        np.testing.assert_array_equal(result, total, f"{call} {compression} {mode}")
        assert result.tobytes() == every[1][call, compression, mode].tobytes()


def _grouped() -> list[np.ndarray]:
    with started() as hvd:
        tensors = [values(hvd.rank(), shape) for shape in SHAPES]
        scaled = hvd.grouped_allreduce(
            tensors, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
        )
        averaged = hvd.allreduce(tensors[1], False)
        return [*(x.numpy() for x in scaled), averaged.numpy()]


def test_a_group_is_reduced_and_scaled(ranks: Callable[..., Any]) -> None:
    found = ranks(2).run(_grouped)[0]
    exact = [sum(values(rank, shape) for rank in range(2)) for shape in SHAPES]
    for result, total in zip(found, [*(2 * x for x in exact), exact[1]], strict=True):
        np.testing.assert_allclose(result, total, atol=1e-12)


def _exchange(hvd: Any) -> Callable[[Any], Any]:
    """Rank 0 keeps a row and sends two; rank 1 keeps one and leaves two out of its tensor."""
    splits = [1, 2] if hvd.rank() == 0 else [0, 1]
    return lambda x: hvd.alltoall(x[: sum(splits)], splits)[0]


def _differentiated() -> dict[str, Any]:
    import tensorflow as tf

    with started() as hvd:
        x = tf.constant(values(hvd.rank(), (3, 2)))
        factor = tf.constant(values(hvd.rank(), (3, 2), seed=1))

        def gradient(call: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = call(x)
                y = tf.reduce_sum(y * factor[: tf.shape(y)[0]])
            return tape.gradient(y, x)

        calls = {
            "sum": partial(hvd.allreduce, op=hvd.Sum),
            "group": lambda x: hvd.grouped_allreduce([tf.constant(1), x[:2], x[2:]], op=hvd.Sum)[1],
            "average": hvd.oob_allreduce,
            "broadcast": partial(hvd.broadcast, root_rank=1),
            "gather": lambda x: hvd.allgather(x)[:3],
            "scatter": lambda x: hvd.reducescatter(x[:2], hvd.Sum),
            "exchange": _exchange(hvd),
        }
        found = {}
        for name, call in calls.items():
            for mode, run in modes(partial(gradient, call)).items():
                found[name, mode] = run().numpy()
        try:
            gradient(partial(hvd.allreduce, op=hvd.Min))
        except Exception as error:
            found["min"] = str(error)
        found["min of a group"] = caught(
            lambda: gradient(lambda x: hvd.grouped_allreduce([x], op=hvd.Min)[0])
        )
        return found


def test_collectives_are_differentiable(ranks: Callable[..., Any]) -> None:
    every = ranks(2).run(_differentiated)
    factors = [values(rank, (3, 2), seed=1) for rank in range(2)]
    total = sum(factors)
    rows_of_both = np.zeros((3, 2))
    rows_of_both[0], rows_of_both[1] = factors[0][0], factors[1][0]
    close = partial(np.testing.assert_allclose, atol=1e-12)
    for rank, found in enumerate(every):
        for mode in ("eager", "traced"):
            close(found["sum", mode], total)
            close(found["group", mode], [*total[:2], [0, 0]])
            close(found["average", mode], total / 2)
            close(found["broadcast", mode], total if rank == 1 else 0 * total)
            close(found["gather", mode], total if rank == 0 else 0 * total)
            close(found["scatter", mode], rows_of_both)
            ours = [factors[0][0], factors[1][0], factors[1][1]]
            close(found["exchange", mode], ours if rank == 0 else [factors[1][2], [0, 0], [0, 0]])
        assert "has no gradient" in found["min"]
        assert "has no gradient" in found["min of a group"]


def _unused() -> list[float]:
    """Results that nothing depends on: the calls are made all the same, once a step."""
    import tensorflow as tf

    with started() as hvd:
        step = tf.function(lambda x: (hvd.oob_allreduce(x), hvd.allreduce(x), None)[2])
        for _ in range(3):
            step(tf.constant(1.0))
        constant = tf.function(lambda: hvd.oob_allreduce(tf.constant(float(hvd.rank()))))
        return [float(constant()) for _ in range(3)]


def test_a_call_whose_result_is_unused_is_made(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_unused) == [[0.5] * 3] * 2


def _skipped() -> str:
    """Rank 1 makes a call whose result is unused; rank 0 makes none: that is noticed."""
    import tensorflow as tf

    with started() as hvd:

        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            if hvd.rank() == 1:
                hvd.allreduce(x, name="unused")
            return hvd.allreduce(x, name="used")

        return caught(lambda: step(tf.constant(1.0)))


def test_an_unused_call_of_one_rank_is_noticed(ranks: Callable[..., Any]) -> None:
    for error in ranks(2).run(_skipped):
        assert "'unused'" in error
