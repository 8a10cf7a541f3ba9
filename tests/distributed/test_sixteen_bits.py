"""16 bits on the wire: of every engine the bits of a float32 sum in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.distributed.collectives import InOrder
from ktrainer.distributed.mpi_gradients import MpiGradients
from tests.dist.small import ENGINES, group_mode

WIRES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
KINDS = [("float32", "fp16"), ("float32", "bf16"), ("bfloat16", "none"), ("float64", "bf16")]
SHAPES = [(5, 7), (0, 3), (), (90_001,), (3, 2)]  # small ones, none, a large one; then rows
WEIGHTS = [0.5, 0.0, 1.7]


def _given(dtype: str, rank: int) -> list[np.ndarray]:
    """Values of this rank, an overflow of fp16 among them; NaN where they are ignored."""
    random = np.random.default_rng(rank)
    arrays = [random.normal(size=shape) for shape in SHAPES]
    arrays[0][0, 0] = 1e5
    wide = [np.full_like(a, np.nan) if WEIGHTS[rank] == 0 else a for a in arrays]
    return [np.asarray(a).astype(tf.as_dtype(dtype).as_numpy_dtype) for a in wide]


def _sums(engine: str, kinds: list[tuple[str, str]]) -> list[list[np.ndarray]]:
    here: Any = distributed.current_world()
    found = []
    for dtype, compression in kinds:
        if engine == "horovod":
            from ktrainer.distributed.horovod_gradients import HorovodGradients

            collectives: Any = HorovodGradients(here, compression)
        else:
            collectives = MpiGradients(here, compression=compression)
        weight = WEIGHTS[here.rank]

        @tf.function(autograph=False)
        def step(*arrays: Any, sums: Any = collectives, weight: float = weight) -> Any:
            *dense, rows = arrays
            own = tf.range(3) + 3 * here.rank
            slices = tf.IndexedSlices(rows, own, tf.constant([9, 2]))
            factor = tf.constant(weight, tf.float64)
            reduced = sums.reduce([*dense, slices], factor, InOrder())
            return [tf.convert_to_tensor(each) for each in reduced]

        found.append([x.numpy() for x in step(*map(tf.constant, _given(dtype, here.rank)))])
        collectives.close()
    return found


def _truth(dtype: str, compression: str, ranks: range) -> list[np.ndarray]:
    given = [_given(dtype, rank) for rank in ranks]
    own = given[0][0].dtype
    wire = WIRES.get(compression, own)
    totals = []
    for k, parts in enumerate(zip(*given, strict=True)):
        rows = k == len(SHAPES) - 1  # are gathered, weighted in their own type if that is wide
        sent = []
        for rank, part in zip(ranks, parts, strict=True):
            if WEIGHTS[rank] == 0:
                part = np.zeros_like(part)
            wide = part if rows and own.itemsize > 2 else part.astype(np.float32)
            with np.errstate(over="ignore"):
                sent.append((wide * wide.dtype.type(WEIGHTS[rank])).astype(wire))
        if rows:
            totals.append(np.concatenate(sent).astype(own))
            continue
        with np.errstate(over="ignore"):
            total = reduce(np.add, [x.astype(np.float32) for x in sent]).astype(wire)
        totals.append(total.astype(own))
    return totals


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_in_float32_and_equal_under_every_engine(
    ranks: Callable[..., Any], engine: str
) -> None:
    by_rank = ranks(3, group_mode(engine)).run(_sums, engine, KINDS)
    for k, kind in enumerate(KINDS):
        expected = _truth(*kind, range(3))
        for found in by_rank:
            for total, truth in zip(found[k], expected, strict=True):
                assert total.tobytes() == truth.tobytes(), kind
