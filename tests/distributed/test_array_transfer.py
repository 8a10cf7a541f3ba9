"""Arrays that move between ranks: each rank gets what it asks for, and no more."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

import ktrainer.distributed.array_transfer as arrays_module
import ktrainer.distributed.array_transfer as gather_module
from ktrainer import distributed
from ktrainer.distributed.array_transfer import broadcast_chosen, gather_arrays, placeholder

ARRAYS = {
    "a": np.arange(7, dtype="float32"),
    "empty": np.zeros((0, 2)),
    "b": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "scalar": np.array(5, "int64"),
    "flags": np.array([True, False, True]),
}
SPECS = {name: placeholder(array.shape, array.dtype) for name, array in ARRAYS.items()}


@contextmanager
def messages_of(size: int) -> Iterator[None]:
    before = arrays_module.BUCKET_BYTES
    arrays_module.BUCKET_BYTES = gather_module.BUCKET_BYTES = size
    try:
        yield
    finally:
        arrays_module.BUCKET_BYTES = gather_module.BUCKET_BYTES = before


def equal(found: dict[str, np.ndarray], names: list[str]) -> None:
    assert sorted(found) == sorted(names)
    for name in names:
        assert (found[name].dtype, found[name].shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        assert found[name].tobytes() == ARRAYS[name].tobytes()


def _choose(size: int) -> None:
    here = distributed.current_world()
    keep = [["flags"], ["b", "empty", "scalar"], []][here.rank]
    with messages_of(size):
        equal(broadcast_chosen(ARRAYS if here.is_root else SPECS, keep, here), keep)


def _little_memory() -> int:
    here, specs = (
        distributed.current_world(),
        {str(i): placeholder((2**20,), "float64") for i in range(4)},
    )
    mine = {name: np.ones(2**20) for name in specs} if here.is_root else specs
    tracemalloc.start()
    with messages_of(2**18):
        broadcast_chosen(mine, [], here)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _gather(size: int, plain: bool) -> None:
    here = distributed.current_world()
    mine = [["flags"], ["a", "scalar"], ["b", "flags", "empty", "a"]][here.rank]
    if plain:  # as in a world that cannot send from one rank to one other
        gather_module._is_mpi = lambda _: False
    try:
        with messages_of(size):
            found = gather_arrays(SPECS, mine, lambda name: ARRAYS[name], here)
    finally:
        gather_module._is_mpi = lambda w: hasattr(w, "comm")
    equal(found, ["a", "scalar", "b", "empty"] if here.is_root else [])


@pytest.mark.parametrize("size", [3, 16, 2**20])
def test_each_rank_gets_what_it_asks_for(ranks, size: int) -> None:
    ranks(3).run(_choose, size)


def test_what_passes_by_takes_little_memory(ranks) -> None:
    assert max(ranks(3).run(_little_memory)) < 2 * 2**20  # of 32 MB


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [3, 2**20])
def test_rank_zero_gets_what_others_have(ranks, size: int, plain: bool) -> None:
    ranks(3).run(_gather, size, plain)


def test_a_placeholder_takes_no_memory() -> None:
    huge = placeholder((2**20, 2**20), "float32")
    assert (huge.shape, huge.dtype, huge.nbytes) == ((2**20, 2**20), np.float32, 2**42)


def test_alone() -> None:
    alone = distributed.SingleWorld()
    equal(broadcast_chosen(ARRAYS, ["a"], alone), ["a"])
    assert gather_arrays(SPECS, ["a"], lambda name: ARRAYS[name], alone) == {}
