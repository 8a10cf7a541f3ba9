"""Host collectives between real processes: values, order, equality, deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import DeadlineExceeded, WorldError
from tests.dist.harness import leaks
from tests.distributed import collectives

DEADLINE = 2.0

WORLDS = [
    *(pytest.param("mpi", size, id=f"mpi-{size}") for size in (1, 2, 3)),
    pytest.param("horovod", 2, id="horovod-2", marks=pytest.mark.horovod),
    *(
        pytest.param(
            "horovod",
            size,
            id=f"horovod-{size}",
            marks=[pytest.mark.horovod, pytest.mark.exhaustive],
        )
        for size in (1, 3)
    ),
]


def _group(ranks: Callable[..., Any], kind: str, size: int) -> Any:
    return ranks(size, "horovod" if kind == "horovod" else "")


@pytest.mark.quick("mpi-4")
@pytest.mark.parametrize(("kind", "size"), [*WORLDS, pytest.param("mpi", 4, id="mpi-4")])
def test_reductions_are_numpys_and_equal_on_all_ranks(
    ranks: Callable[..., Any], kind: str, size: int
) -> None:
    collectives.check_reductions(_group(ranks, kind, size).run(collectives.reductions, kind))


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_numbers_of_python_are_reduced(ranks: Callable[..., Any], kind: str, size: int) -> None:
    group = _group(ranks, kind, size)
    collectives.check_python_numbers(group.run(collectives.python_numbers, kind))


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_objects_and_arrays_arrive(ranks: Callable[..., Any], kind: str, size: int) -> None:
    collectives.check_messages(_group(ranks, kind, size).run(collectives.messages, kind))


def test_large_messages_go_in_pieces(ranks: Callable[..., Any]) -> None:
    results, most = zip(*ranks(3).run(collectives.messages_in_pieces, 100), strict=True)
    collectives.check_messages(results)
    assert min(most) > 10


@pytest.mark.parametrize(("kind", "size"), WORLDS)
def test_no_rank_leaves_a_barrier_before_all_came(
    ranks: Callable[..., Any], kind: str, size: int
) -> None:
    came, left = zip(*_group(ranks, kind, size).run(collectives.barrier, kind), strict=True)
    assert max(came) <= min(left)


def test_one_process_follows_the_same_rules() -> None:
    collectives.check_reductions([collectives.reductions("single")])
    collectives.check_python_numbers([collectives.python_numbers("single")])
    collectives.check_messages([collectives.messages("single")])
    collectives.barrier("single")


@pytest.mark.quick("mpi-barrier")
@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        *(("mpi", name) for name in ("barrier", "broadcast", "allgather", "allreduce")),
        pytest.param("horovod", "any", marks=pytest.mark.horovod),
    ],
)
def test_a_wait_for_a_late_rank_ends_in_time(
    ranks: Callable[..., Any], kind: str, operation: str, tmp_path: Path
) -> None:
    group = _group(ranks, kind, 3) if kind == "horovod" else ranks(3, "late")
    group.run(collectives.barrier, kind)  # imports are not waits
    outcomes = group.outcomes(collectives.late, kind, operation, DEADLINE, tmp_path)
    assert outcomes[1].error is None, outcomes[1].traceback
    for outcome in (outcomes[0], outcomes[2]):
        error = outcome.error
        assert isinstance(error, DeadlineExceeded), outcome
        assert (error.rank, error.step, error.operation) == (outcome.rank, 7, operation)
        assert f"rank {outcome.rank} waited {DEADLINE:g} s at step 7 in {operation!r}" in str(error)
        if kind == "mpi":
            assert "No answer from rank 1: stopped, failed, or busy" in str(error)
            assert f"Waiting at step 7 in {operation!r}: rank {2 - outcome.rank}." in str(error)
        assert DEADLINE <= outcome.seconds < collectives.SECONDS


def _asks_in_a_wait(seconds: float) -> tuple[int, float]:
    """How often MPI is asked whether the last rank has come, and how long the wait is."""
    from ktrainer.distributed import current_world, mpi_world

    world, asks = current_world(), [0]
    completed = mpi_world.has_completed

    def counting(request: Any) -> bool:
        asks[0] += 1
        return completed(request)

    world.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_world, "has_completed", counting)
        patch.setattr(mpi_world, "_SPIN_SECONDS", 0.0)
        if world.rank == world.size - 1:
            time.sleep(seconds)
        began = time.monotonic()
        world.barrier()
    return asks[0], time.monotonic() - began


def test_a_rank_that_waits_leaves_its_core(ranks: Callable[..., Any]) -> None:
    """It pauses for a two-hundredth of the wait, from 200 ms on for 1 ms: 200 ln(200 ms / 10 ms)
    times, and then 800 times."""
    asks, waited = ranks(2).run(_asks_in_a_wait, 1.0)[0]
    # Some hundred more at first; every 50 us would be about 10,000 in a second.
    assert asks < 1000 + 1000 * waited


def test_pauses_of_a_wait() -> None:
    from ktrainer.distributed.mpi_world import pause_after  # starts MPI, whose ports stay open

    leaks.expect_ports()
    assert [pause_after(waited) for waited in (0.005, 0.1, 10.0)] == [50e-6, 0.5e-3, 1e-3]


def test_a_wait_asks_who_is_missing_however_late_it_is(ranks: Callable[..., Any]) -> None:
    group = ranks(2, "late")
    group.run(collectives.barrier, "mpi")
    first, _ = group.outcomes(collectives.stopped, 0.5)
    assert isinstance(first.error, DeadlineExceeded), first
    assert "No answer from rank 1: stopped, failed, or busy" in str(first.error)


def _progress(until: Callable[[], bool]) -> None:
    """Let MPI continue with what it kept, while others take the memory that was freed."""
    from mpi4py import MPI

    end = time.monotonic() + 60.0
    while not until():
        assert time.monotonic() < end, "other ranks have not come so far within 60 s"
        MPI.COMM_WORLD.Iprobe()
        np.full(800_000, 2.0)


def _sums_after_one_rank_was_late(refused: Path, summed: Path) -> list[float | str]:
    """Rank 1 comes to the first sum when rank 0 was refused the second one."""
    from ktrainer.distributed.mpi_world import MpiWorld

    world = MpiWorld(60)

    def told(deadline: float) -> float | str:
        world.deadline = deadline
        try:
            return float(world.oob_allreduce(np.ones(1000), "sum").max())
        except WorldError as error:
            return str(error)

    if world.rank == 0:
        found = [told(0.2), told(0.2)]
        refused.touch()
        _progress(summed.exists)
        return found
    collectives.wait_for_files(refused)
    found = [told(20.0)]
    summed.touch()
    return [*found, told(0.2)]


def test_after_a_deadline_a_rank_can_no_longer_communicate(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    """Its next operation, whatever it was, would be taken for the other ranks' next."""
    files = tmp_path / "refused", tmp_path / "summed"
    first, late = ranks(2, "late").run(_sums_after_one_rank_was_late, *files)
    assert "rank 0 waited 0.2 s" in first[0]
    assert "rank 0 can no longer communicate" in first[1]
    assert first[0].partition("\n")[0] in first[1]
    assert late[0] == 2.0
    assert "rank 1 waited 0.2 s" in late[1]


def _deadlines_met(operation: str, folder: Path) -> int:
    """In turn one rank comes after the deadline of the others; how many this one has met."""
    import tensorflow as tf
    from mpi4py import MPI

    from ktrainer.distributed.collectives import InOrder
    from ktrainer.distributed.mpi_gradients import MpiGradients
    from ktrainer.distributed.mpi_world import MpiWorld

    met, several_pieces = 0, 800_000
    for late in range(MPI.COMM_WORLD.size):
        ended = [folder / f"{late} {rank}" for rank in range(MPI.COMM_WORLD.size)]
        world = MpiWorld(60)
        gradients, one = MpiGradients(world), tf.ones([], tf.float64)
        world.barrier()
        world.deadline = 0.1
        if world.rank == late:
            collectives.wait_for_files(*(path for path in ended if path != ended[late]))
        try:
            array = np.ones(several_pieces)
            if operation == "oob_allreduce":
                world.oob_allreduce(array, "sum")
            elif operation == "sum":
                gradients.sum(tf.constant(array), InOrder())
            elif operation == "reduce":
                gradients.reduce([tf.constant(array)], one, InOrder())
            else:
                gradients.reduce_in_place([array], 1.0)
        except Exception as error:
            met += isinstance(gradients.failure(error) or error, DeadlineExceeded)
        del array
        ended[world.rank].touch()
        _progress(lambda ended=ended: all(path.exists() for path in ended))
        later = time.monotonic() + 0.2
        _progress(lambda later=later: time.monotonic() > later)
        gradients.close()
        world.close()
    return met


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", ["oob_allreduce", "sum", "reduce", "reduce_in_place"])
def test_buffers_outlive_a_wait_that_met_its_deadline(
    ranks: Callable[..., Any], operation: str, tmp_path: Path
) -> None:
    """MPI crashes, then or later, when it makes progress on memory that was freed."""
    assert min(ranks(3, "late").run(_deadlines_met, operation, tmp_path)) >= 2
