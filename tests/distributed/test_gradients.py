"""Sums in the memory where gradients are: the bits of sums into new tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ktrainer import distributed
from ktrainer.distributed import shared_memory, sum_in_place
from ktrainer.distributed.collectives import InOrder, weighted
from ktrainer.distributed.mpi_gradients import MpiGradients
from ktrainer.distributed.shared_memory import open_shared_memory, rows_at_once
from ktrainer.distributed.sum_in_place import PIECE_BYTES, pieces
from tests.dist.small import ENGINES, group_mode

KINDS = [("float32", "none"), ("float64", "none"), ("bfloat16", "none"), ("float32", "fp16")]
# Several pieces, a piece that is not full, an array without elements, small ones together.
SHAPES = [(3, PIECE_BYTES // 8), (5, 7), (0, 3), (), (90_001,), (2, 3, 4)]


def _gradients(dtype: str, rank: int) -> list[tf.Tensor]:
    random = np.random.default_rng(rank)
    return [tf.cast(tf.constant(random.normal(size=shape)), dtype) for shape in SHAPES]


def _reduced(collectives: Any, gradients: list[tf.Tensor], weight: float) -> list[Any]:
    step = tf.function(
        lambda *given: collectives.reduce(given, tf.constant(weight, tf.float64), InOrder()),
        autograph=False,
    )
    return [x.numpy() for x in step(*gradients)]


def _collectives(engine: str, compression: str = "none") -> Any:
    here: Any = distributed.current_world()
    if engine == "horovod":
        from ktrainer.distributed.horovod_gradients import HorovodGradients

        return HorovodGradients(here, compression)
    return MpiGradients(here, compression=compression)


def _both(
    engine: str, kinds: list[tuple[str, str]], weights: list[float]
) -> list[list[list[bytes]]]:
    """For each kind, the sums as new tensors, and in place."""
    here = distributed.current_world()
    every = []
    for dtype, compression in kinds:
        collectives = _collectives(engine, compression)
        gradients, weight = _gradients(dtype, here.rank), weights[here.rank]
        if weight == 0:
            gradients = [gradient * np.nan for gradient in gradients]
        arrays = [np.array(gradient.numpy()) for gradient in gradients]
        collectives.reduce_in_place(arrays, weight)
        reduced = _reduced(collectives, gradients, weight)
        every.append([[x.tobytes() for x in found] for found in (reduced, arrays)])
        collectives.close()
    return every


def _thirds(engine: str, weighted_before: bool) -> float:
    """The sum over three ranks of a third of 16-bit numbers, by that of the numbers."""
    values = tf.constant(np.random.default_rng(0).uniform(1, 2, [3000, 1]), tf.bfloat16)
    third, one = tf.constant(1 / 3, tf.float64), tf.constant(1.0, tf.float64)
    slices = tf.IndexedSlices(values, tf.range(3000), tf.constant([3000, 1]))
    collectives = _collectives(engine)
    given = weighted(slices, third) if weighted_before else slices
    (reduced,) = collectives.reduce([given], one if weighted_before else third, InOrder())
    collectives.close()
    total = tf.reduce_sum(tf.cast(reduced.values, tf.float64))
    return float(total / tf.reduce_sum(tf.cast(values, tf.float64)))


@pytest.mark.quick("mpi")
@pytest.mark.parametrize("engine", ENGINES)
def test_16_bit_slices_are_weighted_in_float32(ranks: Callable[..., Any], engine: str) -> None:
    """A third in 16 bits is 0.2 per cent too large; rounding products has no such bias."""
    for before in (False, True):
        found = ranks(3, group_mode(engine)).run(_thirds, engine, before)
        np.testing.assert_allclose(found, 1.0, atol=3e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("weights", [[0.25, 0.7], [0.0, 1.0]])
def test_two_ranks_get_the_bits_of_new_tensors(
    ranks: Callable[..., Any], engine: str, weights: list[float]
) -> None:
    first, second = ranks(2, group_mode(engine)).run(_both, engine, KINDS, weights)
    for kind, (new, in_place), (other_new, other) in zip(KINDS, first, second, strict=True):
        assert in_place == other == new == other_new, kind


def _three_ways(dtype: str) -> dict[str, list[np.ndarray]]:
    """Sums by shared memory, by messages, as if rank 1 ran elsewhere, and by MPI's all-reduce."""
    found = {"shared memory": _half(dtype)}
    with pytest.MonkeyPatch.context() as patch:
        if distributed.current_world().rank == 1:
            patch.setattr(shared_memory, "_open_memory", lambda path, name: None)
        found["messages"] = _half(dtype)
        patch.setattr(sum_in_place, "MOST_RANKS", 2)
        patch.setattr(shared_memory, "MOST_RANKS", 2)
        found["all-reduce"] = _half(dtype)
    return found


def _half(dtype: str) -> list[np.ndarray]:
    collectives = _collectives("mpi")
    arrays = [
        np.array(gradient.numpy())
        for gradient in _gradients(dtype, distributed.current_world().rank)
    ]
    collectives.reduce_in_place(arrays, 0.5)
    collectives.close()
    return arrays


def test_three_ranks_get_equal_bits(ranks: Callable[..., Any]) -> None:
    every = ranks(3).run(_three_ways, "float64")
    for way in every[0]:
        sums = zip(*(found[way] for found in every), strict=True)
        ours = zip(*(_gradients("float64", rank) for rank in range(3)), strict=True)
        for arrays, mine in zip(sums, ours, strict=True):
            assert len({array.tobytes() for array in arrays}) == 1
            np.testing.assert_allclose(arrays[0], 0.5 * sum(g.numpy() for g in mine), atol=1e-14)
    for shared, sent in zip(every[0]["shared memory"], every[0]["messages"], strict=True):
        assert shared.tobytes() == sent.tobytes()


def _followed(wait: Callable[..., None], then: Callable[[str], Any]) -> Callable[..., None]:
    """`wait`, and then a call with the operation that was waited for."""

    def waits(request: Any, what: str, *buffers: Any) -> None:
        wait(request, what, *buffers)
        then(what)

    return waits


def _many_sums(count: int, buffers: int) -> list[bool]:
    """Whether each of `count` sums, and the rows gathered between them, is right, with so many
    buffers. Ranks sleep now and then before they write and before they read.
    """
    here: Any = distributed.current_world()
    random, found = np.random.default_rng(here.rank), []
    more_than_all_buffers = (buffers + 1) * PIECE_BYTES // 8

    def pause() -> None:
        time.sleep(random.choice([0.0, 0.0, 0.0, 5e-4]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_BUFFERS", buffers)
        patch.setattr(here, "wait", _followed(here.wait, lambda _: pause()))
        shared = open_shared_memory(here, here.comm)
        assert shared is not None
        for number in range(count):
            length = 1 + number % 7 if number % 50 else more_than_all_buffers
            array = np.full(length, 2.0**here.rank + number)
            pause()
            shared.sum_in_place(array, "numbers")
            found.append(bool((array == 2.0**here.size - 1 + here.size * number).all()))
            for turn in range(number % 3):  # of two, one is used again after one barrier
                mine = [100 * rank + 10 * number + turn for rank in range(here.size)]
                pause()
                (rows,) = shared.gather_rows([np.full(2, mine[here.rank])], "numbers")
                found.append(rows.tolist() == [each for each in mine for _ in range(2)])
    return found


def test_shared_memory_is_not_overwritten_before_all_have_read(ranks: Callable[..., Any]) -> None:
    for size in (2, 3, 4):
        for buffers in (2, shared_memory._BUFFERS):
            assert all(all(found) for found in ranks(size).run(_many_sums, 300, buffers))


def _rows_three_times(width: int, wire: str) -> tuple[list[list[np.ndarray]], list[int]]:
    """Rows of all ranks, as memory they share gathers them, as messages do, and as they are; and
    how often a rank waits for that in memory, and by messages."""
    here: Any = distributed.current_world()
    counts = [0, 3 * rows_at_once([np.empty((0, width), "f"), np.empty(0, "q")]) // 2 + 5, 7]
    values = [
        np.random.default_rng(rank).normal(size=(counts[rank], width)).astype("f")
        for rank in range(here.size)
    ]
    indices = [np.arange(len(rows)) * (rank + 1) for rank, rows in enumerate(values)]
    weight, mine = np.array([0.5, 0.5, 0.0][here.rank]), (values[here.rank], indices[here.rank])
    found, waits = [], []
    for open_memory in (shared_memory._open_memory, lambda path, name: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "_open_memory", open_memory)
            collectives = MpiGradients(here, compression=wire)
            operations: list[str] = []
            patch.setattr(here, "wait", _followed(here.wait, operations.append))
            nothing = collectives.gather_slices(weight, mine[0][:0], mine[1][:0])
            assert [len(rows) for rows in nothing] == [0, 0]
            operations.clear()
            found.append(list(collectives.gather_slices(weight, *mine)))
        waits.append(len(operations))
        collectives.close()
    weighted = np.concatenate(values[:2]) * np.float32(0.5)  # a third rank has no weight
    if wire == "fp16":
        weighted = weighted.astype(np.float16).astype("f")
    return [*found, [weighted, np.concatenate(indices[:2])]], waits


# 16 numbers a row: memory takes them in two turns; a buffer does not hold 64 rows of 20,000.
@pytest.mark.parametrize(
    "width, wire, in_memory",
    [(16, "none", 2), (16, "fp16", 1), (0, "none", 2), (20_000, "none", 3)],
)
def test_shared_memory_gathers_the_rows_that_messages_do(
    ranks: Callable[..., Any], width: int, wire: str, in_memory: int
) -> None:
    for size in (2, 3):
        for found, waits in ranks(size).run(_rows_three_times, width, wire):
            assert waits == [in_memory, 3]
            for gathered in found[:2]:
                for array, expected in zip(gathered, found[2], strict=True):
                    assert array.dtype == expected.dtype
                    np.testing.assert_array_equal(array, expected)


def _mapped_when_closed() -> list[int]:
    """How often memory of ranks is mapped while gradients are open, and once they are closed."""
    gradients, found = MpiGradients(distributed.current_world()), []  # type: ignore[arg-type]
    _reduced(gradients, [tf.ones(100_000)], 1.0)  # TensorFlow keeps the function, and `gradients`
    for end in (lambda: None, gradients.close):
        end()
        found.append(Path("/proc/self/maps").read_text().count("memfd:ktrainer"))
    return found


def test_memory_is_freed_when_gradients_are_closed(ranks: Callable[..., Any]) -> None:
    assert ranks(2).run(_mapped_when_closed) == [[2, 0]] * 2


def test_pieces_are_bounded_and_cover_everything() -> None:
    arrays = [np.zeros(size, dtype) for size in (7, 3 * PIECE_BYTES, 9) for dtype in "fd"]
    arrays += [np.zeros(4000, "f") for _ in range(200)]
    for views in pieces(arrays):
        assert len({view.dtype for view in views}) == 1
        assert sum(view.nbytes for view in views) <= PIECE_BYTES
        for view in views:
            assert not view.any()  # nothing comes twice
            view += 1
    assert all(array.all() for array in arrays)


def _shared_memory() -> list[list[float]]:
    """Sums of gradients that share memory with one another, a constant, a variable or an output."""
    here: Any = distributed.current_world()
    size = 20_000  # not so small that it is copied
    collectives = MpiGradients(here, bucket_mb=1e-6)  # each gradient is a bucket
    together = MpiGradients(here)
    variable = tf.Variable(tf.fill([size], 2.0))

    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tf.Tensor:
        return collectives.reduce([x], tf.ones([], tf.float64), InOrder())[0]

    @tf.function(autograph=False)
    def step(x: tf.Tensor, weight: tf.Tensor) -> Any:
        order, y = InOrder(), x + 1.0
        reduced = []
        for sums in (collectives, together):
            equal = [y, y, tf.identity(y), x + 1.0, tf.fill([size], 3.0), variable.value(), x]
            reduced += sums.reduce(equal, weight, order)
            reduced += sums.reduce(equal, tf.ones([], tf.float64), order)
        reduced += [inner(y), inner(y), inner(inner(y))]
        return reduced, [y, x, variable.value(), tf.fill([size], 3.0)]

    found = []
    x = tf.fill([size], float(here.rank))
    for _ in range(3):  # constants keep their memory from one step to the next
        reduced, others = step(x, tf.constant(0.5 + here.rank, tf.float64))
        found.append([float(tf.reduce_min(each)) for each in (*reduced, *others, variable, x)])
        found.append([float(tf.reduce_max(each)) for each in (*reduced, *others, variable, x)])
    collectives.close()
    together.close()
    return found


def test_sums_in_place_overwrite_nothing_else(ranks: Callable[..., Any]) -> None:
    # Gradients y = rank + 1 (four times), 3, 2 and rank, with weights 0.5 and 1.5, then 1.
    weighted, plain = [3.5] * 4 + [6.0, 4.0, 1.5], [3.0] * 4 + [6.0, 4.0, 1.0]
    for rank, found in enumerate(ranks(2).run(_shared_memory)):
        expected = [*weighted, *plain] * 2 + [3.0, 3.0, 6.0]
        expected += [rank + 1.0, rank, 2.0, 3.0, 2.0, rank]
        assert found == [expected] * 6


def _overlap(kind: str, bucket_mb: float | None = 1.0) -> list[float]:
    """Reduce gradients of which the first one is not there until a collective has begun."""
    here: Any = distributed.current_world()
    collectives = MpiGradients(here, bucket_mb=bucket_mb)
    begun, reduce_slices, sum_buckets = (
        threading.Event(),
        collectives.gather_slices,
        collectives.sum_bucket,
    )

    def begin(call: Callable[..., Any]) -> Callable[..., Any]:
        def begins(*args: Any) -> Any:
            begun.set()
            return call(*args)

        return begins

    collectives.gather_slices = begin(reduce_slices)  # type: ignore[method-assign]
    collectives.sum_bucket = begin(sum_buckets)  # type: ignore[method-assign]

    def wait(x: np.ndarray) -> np.ndarray:
        assert begun.wait(30), "no collective has begun before the last gradient was there"
        return x

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Any:
        late = tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)
        early: Any = tf.fill([64, 1024], 2.0)
        if kind == "sparse":
            early = tf.IndexedSlices(early, tf.range(64), tf.constant([100, 1024]))
        reduced = collectives.reduce([late, early], tf.ones([], tf.float64), InOrder())
        return [tf.reduce_sum(tf.convert_to_tensor(gradient)) for gradient in reduced]

    found = [float(total) for total in step(tf.ones([1024, 512]))]
    collectives.close()
    return found


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_sums_begin_before_the_last_gradient_is_there(ranks: Callable[..., Any], kind: str) -> None:
    """The late one has 2 MiB, a bucket of its own."""
    size = 1024 * 512
    assert ranks(2).run(_overlap, kind) == [[2.0 * size, 4.0 * 64 * 1024]] * 2
