"""Horovod's start, and groups of its ranks that sum among themselves.

Horovod calls such a group a process set. It must be told of all sets when it starts, on every rank
in the same order. (It can add some later, under HOROVOD_DYNAMIC_PROCESS_SETS=1; then its background
threads ask each other in every cycle whether there is a new one.) Sets that are asked for when it
runs already make it start again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ktrainer.world.base import World

_sets: dict[tuple[int, ...], Any] = {}  # of this process's Horovod, in the order of their numbers


def initialised_horovod(deadline: float = 300.0, sets: Sequence[Any] = ()) -> Any:
    """The module `horovod.tensorflow`, initialised once.

    Args:
        deadline: seconds after which Horovod gives up a tensor that some rank did not submit.
        sets: the process sets that it starts with, if it does start.
    """
    import horovod.tensorflow as hvd

    if not hvd.is_initialized():
        limits = {
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, int(deadline / 2))),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(1, int(deadline))),
        }
        added = {key: value for key, value in limits.items() if key not in os.environ}
        os.environ.update(added)
        try:
            hvd.init(process_sets=list(sets))  # reads the limits once
        finally:
            for key in added:
                del os.environ[key]
    return hvd


def process_set_of(world: World, ranks: Sequence[int], all_groups: Sequence[Sequence[int]]) -> Any:
    """The process set of `ranks`. All ranks of `world` call it together.

    Args:
        world: the processes; Horovod must see the same ones.
        ranks: two at least, this one among them.
        all_groups: the groups of all ranks, in the same order on every rank.

    Raises:
        ValueError: `ranks` is not one of the groups, or has a single rank.
    """
    groups = [tuple(sorted(int(rank) for rank in group)) for group in all_groups]
    mine = tuple(sorted(int(rank) for rank in ranks))
    if mine not in groups or world.rank not in mine or len(mine) < 2:
        raise ValueError(
            f"rank {world.rank} cannot sum over ranks {list(mine)}: they must be two or more, this "
            f"one among them, and one of the groups {[list(group) for group in groups]}"
        )
    hvd = _started_with(world, [group for group in groups if 1 < len(group) < world.size])
    return hvd.global_process_set if len(mine) == world.size else _sets[mine]


def _started_with(world: World, groups: Sequence[tuple[int, ...]]) -> Any:
    """Horovod, knowing of `groups` and of all sets from before, which keep their numbers."""
    import horovod.tensorflow as hvd

    running = hvd.is_initialized()
    if not running or any(group not in _sets for group in groups):
        for group in groups:
            _sets.setdefault(group, hvd.ProcessSet(list(group)))
        # A rank that stops stops Horovod on all of them: first all must have seen it running.
        world.barrier("start Horovod with process sets")
        if running:
            hvd.shutdown()
    return initialised_horovod(world.deadline, list(_sets.values()))
