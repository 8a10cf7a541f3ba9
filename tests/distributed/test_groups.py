"""Groups of some of the ranks: collectives of several groups at once, order, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktrainer import distributed
from ktrainer.distributed import stack_dump
from ktrainer.distributed.deadlines import call_with_deadline
from ktrainer.errors import DeadlineExceeded, WorldError
from tests.dist.harness import PerRank
from tests.distributed import collectives

CHECKS = {
    collectives.reductions: collectives.check_reductions,
    collectives.python_numbers: collectives.check_python_numbers,
    collectives.messages: collectives.check_messages,
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_groups_use_their_collectives_at_the_same_time(
    ranks: Callable[..., Any], size: int
) -> None:
    for run, check in CHECKS.items():
        results = ranks(size).run(run, "group")
        for first in range(min(2, size)):
            check(results[first::2])


def test_a_barrier_is_for_the_group_alone(ranks: Callable[..., Any], tmp_path: Path) -> None:
    # The last of the odd ranks comes when the even ones have left: they do not wait for it.
    came, left = zip(*ranks(4).run(_barrier, tmp_path), strict=True)
    assert max(came[1::2]) <= min(left[1::2])
    assert max(left[0::2]) < max(came)


def _barrier(folder: Path) -> tuple[float, float]:
    with collectives.opened("group") as group:
        distributed.current_world().barrier()
        rank = distributed.current_world().rank
        if rank == 3:
            collectives.wait_for_files(folder / "0", folder / "2")
        came = time.monotonic()
        group.barrier()
        left = time.monotonic()
        (folder / str(rank)).touch()
        return came, left


def _place(ranks: Sequence[int]) -> tuple[Any, ...]:
    whole: Any = distributed.current_world()
    group = whole.group(ranks, "the group")
    try:
        sent = group.broadcast(whole.rank, root=1)
        return group.rank, group.size, group.ranks, group.allgather(whole.rank), sent
    finally:
        group.close()
        group.close()


def test_the_order_of_a_group_is_that_of_its_ranks(ranks: Callable[..., Any]) -> None:
    mine = PerRank([[2, 0], [3, 1], [2, 0], [3, 1]])
    zero, one, two, three = ranks(4).run(_place, mine)
    assert zero == (1, 2, (2, 0), [2, 0], 0)
    assert two == (0, 2, (2, 0), [2, 0], 0)
    assert one == (1, 2, (3, 1), [3, 1], 1)
    assert three == (0, 2, (3, 1), [3, 1], 1)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[0, 1], [1]], id="a member that does not know of it"),
        pytest.param([[1], [0]], id="not one's own group"),
        pytest.param([[0, 2], [1]], id="no such rank"),
        pytest.param([[0, 1], [1, 0]], id="another order"),
        pytest.param([[0, 0], [1]], id="a rank twice"),
        pytest.param([[], [1]], id="no rank"),
    ],
)
def test_ranks_that_disagree_on_their_groups(
    ranks: Callable[..., Any], groups: list[list[int]]
) -> None:
    for outcome in ranks(2).outcomes(_place, PerRank(groups)):
        assert isinstance(outcome.error, WorldError), outcome
        assert f"the groups by rank are {groups}" in str(outcome.error)


def _late() -> None:
    whole: Any = distributed.current_world()
    group = whole.group([whole.rank % 2, whole.rank % 2 + 2], "the odd or even ones")
    # After it was opened: a group has the step and the deadline that the world has now.
    whole.step, whole.deadline = 7, 0.5 if whole.rank == 1 else collectives.SECONDS
    assert (group.step, group.deadline) == (7, whole.deadline)
    if whole.rank == 3:
        return
    group.oob_allreduce(np.float32(1))


def test_a_late_rank_stops_its_own_group_only(ranks: Callable[..., Any]) -> None:
    outcomes = ranks(4, "late").outcomes(_late)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    error = outcomes[1].error
    assert isinstance(error, DeadlineExceeded), outcomes[1]
    assert (error.rank, error.step, error.seconds) == (1, 7, 0.5)
    assert "oob_allreduce among the odd or even ones (ranks 1, 3)" in str(error)


def _use_again(interrupted: str) -> list[tuple[str, bool]]:
    """What rank 0 of two is told when it uses anything after a wait that met its deadline."""
    from ktrainer.backends.pipeline.runtime.transport import Transport
    from ktrainer.errors import WorldError

    whole: Any = distributed.current_world()
    group = whole.group([1, 0], "both")
    transport = Transport(group, 2)
    whole.deadline = 0.3
    if whole.rank == 1:
        return []
    enough = threading.Event()
    try:
        if interrupted == "group":
            group.barrier()
        else:
            call_with_deadline(whole, lambda: enough.wait(60), "open something")
    except DeadlineExceeded as error:
        first = error
    enough.set()
    found = []
    uses: list[Callable[[], Any]] = [whole.barrier, group.barrier, whole.duplicate]
    for use in [*uses, lambda: transport.send_object(0, 0, "an object")]:
        try:
            use()
        except WorldError as error:
            found.append((str(error), error.__cause__ is first))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("interrupted", ["group", "blocking call"])
def test_after_a_deadline_nothing_of_the_world_is_used(
    ranks: Callable[..., Any], interrupted: str
) -> None:
    found, _ = ranks(2, "late").run(_use_again, interrupted)
    assert len(found) == 4
    for said, caused in found:
        assert "rank 0 can no longer communicate" in said
        assert caused


def _blocked(folder: Path) -> None:
    whole: Any = distributed.current_world()
    whole.deadline = collectives.SECONDS
    whole.barrier()  # the others begin to wait together: each answers the other's question
    whole.step, whole.deadline = 7, 2.0
    if whole.rank == 1:
        collectives.wait_for_files(folder / "0", folder / "2")
        return
    try:
        with collectives.asking_early(whole, 1.5), pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack_dump, "_SECONDS", 10.0)  # rank 1 may not run for a while
            call_with_deadline(whole, lambda: time.sleep(60.0), "open the group")
    finally:
        (folder / str(whole.rank)).touch()


def test_a_blocking_call_that_takes_too_long_says_who_is_missing(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    outcomes = ranks(3, "late").outcomes(_blocked, tmp_path)
    stacks = []
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, DeadlineExceeded), outcome
        said = str(outcome.error)
        assert "waited 2 s at step 7 in 'open the group'" in said
        assert "No answer from rank 1: stopped, failed, or busy" in said
        assert f"Waiting at step 7 in 'open the group': rank {2 - outcome.rank}." in said
        stacks.append(said.partition("\nrank 1 (process ")[2])
    # A dump that pauses while it is written is cut off, and the main thread's stack comes last.
    assert all(") is at:" in stack for stack in stacks), stacks
    assert any("in _blocked" in stack for stack in stacks), stacks
