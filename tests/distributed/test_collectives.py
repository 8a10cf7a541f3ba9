"""Host collectives between real processes: values, order, equality, deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import DeadlineExceeded
from tests.distributed import collectives

DEADLINE = 0.5

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
        *(
            ("mpi", name)
            for name in ("barrier", "broadcast", "allgather", "oob_allreduce", "allreduce", "any")
        ),
        pytest.param("horovod", "barrier", marks=pytest.mark.horovod),
        pytest.param("horovod", "any", marks=pytest.mark.horovod),
    ],
)
def test_a_wait_for_a_late_rank_ends_in_time(
    ranks: Callable[..., Any], kind: str, operation: str
) -> None:
    group = _group(ranks, kind, 3)
    group.run(collectives.barrier, kind)  # imports are not waits
    outcomes = group.outcomes(collectives.late, kind, operation, DEADLINE)
    assert outcomes[1].error is None, outcomes[1].traceback
    for outcome in (outcomes[0], outcomes[2]):
        error = outcome.error
        assert isinstance(error, DeadlineExceeded), outcome
        assert (error.rank, error.step, error.operation) == (outcome.rank, 7, operation)
        assert f"rank {outcome.rank} waited 0.5 s at step 7 in {operation!r}" in str(error)
        if kind == "mpi":
            assert "No answer from rank 1: stopped, failed, or busy" in str(error)
            assert f"Waiting at step 7 in {operation!r}: rank {2 - outcome.rank}." in str(error)
        assert DEADLINE <= outcome.seconds < collectives.LATE * DEADLINE


def test_a_wait_asks_who_is_missing_however_late_it_is(ranks: Callable[..., Any]) -> None:
    group = ranks(2)
    group.run(collectives.barrier, "mpi")
    first, _ = group.outcomes(collectives.stopped, DEADLINE)
    assert isinstance(first.error, DeadlineExceeded), first
    assert "No answer from rank 1: stopped, failed, or busy" in str(first.error)


def _collectives_after_waits_that_ended() -> float:
    """In turn one rank comes too late for a sum, which the others have given up by then."""
    from ktrainer.distributed.mpi_world import MpiWorld

    for late in range(3):
        world = MpiWorld(60)
        world.deadline = 0.1
        with suppress(DeadlineExceeded):
            time.sleep(0.3 * (world.rank == late))
            world.oob_allreduce(np.ones(100_000), "sum")
        time.sleep(0.3)
        world.close()
    world = MpiWorld(60)
    world.deadline = 60
    total = world.oob_allreduce(np.ones(100_000), "sum")
    world.close()
    return float(total.max())


def test_mpi_keeps_what_ended_waits_left_to_it(ranks: Callable[..., Any]) -> None:
    """Buffers that were freed under MPI crashed the next collective, or a later one."""
    assert ranks(3).run(_collectives_after_waits_that_ended) == [3.0] * 3
