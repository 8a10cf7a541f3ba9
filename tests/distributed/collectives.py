"""Collectives to run on every rank, and what must come of them, for any kind of world.

Inputs follow from rank, dtype and shape, so that a test knows those of all ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from ktrainer.distributed import SingleWorld, World, mpi_chunks, open_world

SECONDS = 20.0
OPS = ("sum", "average", "min", "max")
SHAPES = ((), (1,), (1000,), (3, 1, 5), (0,))
INTEGERS = [np.dtype(np.int32), np.dtype(np.int64)]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
DTYPES = [*INTEGERS, *HALVES, np.dtype(np.float32), np.dtype(np.float64)]

Key = tuple[str, tuple[int, ...], str]  # dtype, shape, operation


@contextmanager
def opened(kind: str, deadline: float = SECONDS) -> Iterator[World]:
    """A world of this kind; MPI's stays open for later tasks, as in a script.

    `"group"` is every second rank of MPI's world: the even ones, or the odd ones.
    """
    if kind == "mpi":
        world = open_world(deadline)
    elif kind == "group":
        whole = cast(Any, open_world(deadline))
        world = whole.group(range(whole.rank % 2, whole.size, 2), "every second rank")
    elif kind == "horovod":
        from ktrainer.distributed.horovod_world import HorovodWorld

        world = HorovodWorld()
        world.deadline = deadline
    else:
        world = SingleWorld()
    assert world.name == ("mpi" if kind == "group" else kind)
    yield world
    if kind != "mpi":
        world.close()


@contextmanager
def asking_early(world: World, seconds: float) -> Iterator[None]:
    """Have this rank ask who is missing, and answer, so many seconds before its deadline, not just
    in the last quarter: ranks that begin late, or do not run for a while, answer in time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world), "answer_seconds", seconds)
        yield


def wait_for_files(*paths: Path, seconds: float = 60.0) -> None:
    """Wait for what other ranks create, which may not communicate, when they have come so far."""
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"not all of {paths} are there after {seconds:g} s"
        time.sleep(0.02)


def given(rank: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """What a rank puts in: numbers of both signs."""
    random = np.random.default_rng([rank, len(shape), *shape])
    return np.asarray(random.normal(0, 50, shape)).astype(dtype)


def reductions(kind: str) -> dict[Key, np.ndarray]:
    """Every operation on every dtype and shape, by both methods of the interface."""
    results: dict[Key, np.ndarray] = {}
    with opened(kind) as world:
        for dtype in DTYPES:
            for shape in SHAPES:
                for op in OPS:
                    value = given(world.rank, dtype, shape)
                    total = world.oob_allreduce(value, op)
                    again = world.allreduce(value, op)
                    assert again.tobytes() == total.tobytes()
                    assert value.tobytes() == given(world.rank, dtype, shape).tobytes()
                    results[dtype.name, shape, op] = total
    return results


def check_reductions(ranks: Sequence[dict[Key, np.ndarray]]) -> None:
    """Equal on all ranks, bit for bit, and what NumPy makes of all ranks' inputs."""
    assert len(ranks[0]) == len(DTYPES) * len(SHAPES) * len(OPS)
    numpy_op = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}
    for (name, shape, op), total in ranks[0].items():
        what, dtype = f"{op} of {name} {shape}", np.dtype(name)
        for other in ranks[1:]:
            assert other[name, shape, op].tobytes() == total.tobytes(), what
        averages_integers = op == "average" and dtype in INTEGERS
        assert total.dtype == (np.float64 if averages_integers else dtype), what
        assert total.shape == shape, what
        exact = [given(rank, dtype, shape).astype(np.float64) for rank in range(len(ranks))]
        rounding = 0.0
        if op in ("sum", "average") and not (dtype in INTEGERS and op == "sum"):
            rounding = float(ml_dtypes.finfo(total.dtype).eps) * np.abs(exact).sum(0).max(initial=0)
        np.testing.assert_allclose(
            total.astype(np.float64), numpy_op[op](exact, axis=0), 0, rounding, err_msg=what
        )


def python_numbers(kind: str) -> list[tuple[float, str]]:
    """Reductions of plain numbers of Python."""
    with opened(kind) as world:
        numbers = [(world.rank + 1, "sum"), (world.rank + 1, "average"), (0.5, "max")]
        totals = [world.oob_allreduce(number, op) for number, op in numbers]
        assert [total.shape for total in totals] == [()] * 3
        return [(total.item(), total.dtype.name) for total in totals]


def check_python_numbers(ranks: Sequence[list[tuple[float, str]]]) -> None:
    """Integers and floats of 64 bits; an average of integers is a float."""
    size = len(ranks)
    mine = [(size * (size + 1) // 2, "int64"), ((size + 1) / 2, "float64"), (0.5, "float64")]
    assert ranks == [mine] * size


def _thing(rank: int) -> dict[str, Any]:
    """An object whose pickle is longer on higher ranks."""
    return {"rank": rank, "text": "é" * (1 + 1000 * rank), "array": np.arange(rank), "none": None}


def _arrays(rank: int) -> list[np.ndarray]:
    """Arrays that MPI or Horovod has no type for, or that lie in memory in another order."""
    values = np.arange(12.0).reshape(3, 4) + 100 * rank
    return [
        *(values.astype(dtype) for dtype in DTYPES),
        values % 5 == 2,
        np.asfortranarray(values),
        values[:, ::2],
        np.array(rank + 0.5),
        np.zeros((0, 3), np.float32),
    ]


def messages(kind: str) -> dict[str, Any]:
    """Objects and arrays from the first and last rank, and from all; votes."""
    with opened(kind) as world:
        rank, last, results = world.rank, world.size - 1, dict[str, Any]()
        for root in {0, last}:
            mine = _arrays(rank)
            # The others need not have the object.
            results[f"object {root}"] = world.broadcast(_thing(rank) if rank == root else 0, root)
            results[f"array {root}"] = [world.broadcast(array, root) for array in mine]
            results[f"list {root}"] = world.broadcast(mine, root)
            results[f"mixed list {root}"] = world.broadcast([rank, "x", mine[0]], root)
            assert [a.tobytes() for a in mine] == [a.tobytes() for a in _arrays(rank)]
        results["gathered"] = world.allgather(_thing(rank))
        votes = (False, rank == last, rank == 0, True)
        results["any"] = [world.any(vote) for vote in votes]
        return results


def messages_in_pieces(most_bytes: int) -> tuple[dict[str, Any], int]:
    """The same where one message carries little; and into how many pieces the largest one went."""
    before, split, most = mpi_chunks.MOST_BYTES, mpi_chunks.pieces, 0

    def counted(data: np.ndarray) -> list[np.ndarray]:
        nonlocal most
        parts = split(data)
        most = max(most, len(parts))
        return parts

    mpi_chunks.MOST_BYTES, mpi_chunks.pieces = most_bytes, counted
    try:
        return messages("mpi"), most
    finally:
        mpi_chunks.MOST_BYTES, mpi_chunks.pieces = before, split


def check_messages(ranks: Sequence[dict[str, Any]]) -> None:
    """What the root had, or all had, in order."""
    last = len(ranks) - 1
    for results in ranks:
        for root in {0, last}:
            same(results[f"object {root}"], _thing(root))
            same(results[f"array {root}"], _arrays(root))
            same(results[f"list {root}"], _arrays(root))
            same(results[f"mixed list {root}"], [root, "x", _arrays(root)[0]])
        same(results["gathered"], [_thing(rank) for rank in range(len(ranks))])
        assert results["any"] == [False, True, True, True]


def same(ours: Any, theirs: Any) -> None:
    """Equal in type, and for arrays in dtype, shape and bytes."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, list):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    else:
        assert ours == theirs


def barrier(kind: str) -> tuple[float, float]:
    """When this rank came to a barrier, the last rank later than the others, and when it left."""
    with opened(kind) as world:
        if world.rank == world.size - 1:
            time.sleep(0.3)
        came = time.monotonic()
        world.barrier()
        return came, time.monotonic()


def late(kind: str, operation: str, deadline: float, folder: Path) -> None:
    """Rank 1 comes to `operation` after the deadline of the others, or not at all."""
    with opened(kind) as world:
        world.barrier()  # the others begin to wait together: each answers the other's question
        world.step = 7
        if world.rank == 1:
            if kind == "mpi":
                return
            wait_for_files(folder / "0", folder / "2")  # Horovod would wait for this rank for good
        else:
            world.deadline = deadline
            assert kind != "mpi" or world.answer_seconds == deadline / 4
        calls = {
            "barrier": world.barrier,
            "broadcast": lambda: world.broadcast(np.zeros(3), 1),
            "allgather": lambda: world.allgather("x"),
            "allreduce": lambda: world.allreduce(1.0),
            "any": lambda: world.any(False),
        }
        try:
            with asking_early(world, 0.75 * deadline):
                calls[operation]()
        finally:
            (folder / str(world.rank)).touch()


def stopped(deadline: float) -> None:
    """Rank 0 waits for rank 1, and does not run while the deadline passes."""
    with opened("mpi") as world:
        pid = world.broadcast(os.getpid(), 0)
        world.deadline, world.step = deadline, 7
        if world.rank == 0:
            world.barrier()
            return
        time.sleep(deadline / 5)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(deadline * 2)
        os.kill(pid, signal.SIGCONT)
        time.sleep(deadline)
