"""A world over Horovod after a wait that ended before its operation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ktrainer.distributed.horovod_world import HorovodWorld
from ktrainer.errors import DeadlineExceeded, WorldError
from tests.distributed import collectives
from tests.distributed.test_interruptions import interrupted


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HorovodWorld, list[str]]]:
    """Rank 0 of two, whose other rank comes to no operation; and the names of its operations."""
    module, released, begun = ModuleType("horovod"), threading.Event(), list[str]()

    def block(*args: Any, name: str, **kwargs: Any) -> Any:
        begun.append(name)
        released.wait(60)
        return SimpleNamespace(numpy=lambda: np.ones(1, np.int64))

    numbers = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2}
    module.__dict__.update({key: lambda value=value: value for key, value in numbers.items()})
    module.__dict__.update(is_initialized=lambda: True, tensorflow=module, Sum="sum")
    module.__dict__.update(dict.fromkeys(("broadcast", "allgather", "allreduce"), block))
    monkeypatch.setitem(sys.modules, "horovod", module)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", module)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which a world replaces
    world = HorovodWorld(30.0)
    yield world, begun
    released.set()
    world.close()


USES: dict[str, Callable[[Any], Any]] = {
    "barrier": lambda world: world.barrier(),
    "array": lambda world: world.broadcast(np.ones(3)),
    "object": lambda world: world.broadcast("an object"),
    "allgather": lambda world: world.allgather("an object"),
    "sum": lambda world: world.oob_allreduce(1.0, "sum"),
}


def refused(world: Any) -> list[BaseException | None]:
    """Check that every use is refused; by what each of them was caused."""
    causes = []
    for use in USES.values():
        with pytest.raises(WorldError, match="rank 0 can no longer communicate") as refusal:
            use(world)
        causes.append(refusal.value.__cause__)
    return causes


@pytest.mark.parametrize("name", USES)
def test_after_ctrl_c_a_rank_can_no_longer_communicate(
    lonely: Any, within: Callable[..., None], name: str
) -> None:
    """The parts of an operation are numbered: its next one would be taken for another's part."""
    world, begun = lonely
    error = interrupted(lambda: USES[name](world), "_wait")
    assert refused(world) == [error] * len(USES)
    within(30, lambda: begun, "the start of an operation")  # in a thread of its own
    assert begun == ["oob.1"]


def test_after_a_deadline_a_rank_can_no_longer_communicate(
    lonely: Any, within: Callable[..., None]
) -> None:
    world, begun = lonely
    world.deadline = 0.2
    with pytest.raises(DeadlineExceeded) as late:
        world.allgather("an object")
    assert refused(world) == [late.value] * len(USES)
    within(30, lambda: begun, "the start of the operation")  # in a thread of its own
    assert begun == ["oob.1"]


def _late(gave_up: Path, refused: Path) -> str:
    """What a rank is told at its next operation, after rank 1 came late to one of two parts."""
    with collectives.opened("horovod") as opened:
        world: Any = opened
        world.barrier()
        world.deadline = 1.0
        if world.rank == 1:
            collectives.wait_for_files(gave_up)
        with pytest.raises(DeadlineExceeded):
            world.allgather("an object")
        gave_up.touch()
        with pytest.raises(WorldError) as refusal:
            world.oob_allreduce(1.0, "sum")
        if world.rank == 1:
            refused.touch()
        collectives.wait_for_files(refused)
        world._hvd.shutdown()  # ends the second part of rank 1
        return str(refusal.value)


@pytest.mark.horovod
def test_a_late_rank_is_not_taken_for_one_in_the_next_operation(
    ranks: Callable[..., Any], tmp_path: Path
) -> None:
    told = ranks(2, "horovod late").run(_late, tmp_path / "gave up", tmp_path / "refused")
    for rank, said in enumerate(told):
        assert f"rank {rank} can no longer communicate" in said
