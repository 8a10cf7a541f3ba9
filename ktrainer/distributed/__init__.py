"""Worlds and collectives: rank and size, host messages, sums of gradients.

world_factory.py        detects the launcher, and opens the world that fits it
world.py                the interface of all worlds: `World`
mpi_world.py, elastic_world.py, horovod_world.py, cluster_world.py    the worlds
mpi_communicator.py, array_transfer.py, mpi_chunks.py, mpi_rows.py   messages and arrays
rank_layout.py          the grid of partitions and replicas
collectives.py          the interface for sums inside a compiled step: `GradientCollectives`
mpi_gradients.py, horovod_gradients.py    sum gradients
sum_in_place.py, shared_memory.py, host_groups.py   sums of arrays: by messages; through memory of
                        one host, rows too; within hosts first
sixteen_bits.py         conversions to 16-bit floats
deadlines.py, stall_report.py, stack_dump.py   deadlines of waits, and reports for their errors
elastic_members.py, joining_ranks.py           members of an elastic world; ranks that join
launcher_events.py, restart_records.py         events for the launcher; records over restarts
listening_sockets.py    keeps sockets of libraries on loopback, or on one interface
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktrainer.distributed.world import ReduceOp, SingleWorld, World
    from ktrainer.distributed.world_factory import (
        barrier,
        current_world,
        is_open,
        open_world,
    )

_WHERE = {
    **dict.fromkeys(("ReduceOp", "SingleWorld", "World"), "ktrainer.distributed.world"),
    **dict.fromkeys(
        ("barrier", "current_world", "is_open", "open_world"), "ktrainer.distributed.world_factory"
    ),
}

__all__ = ["ReduceOp", "SingleWorld", "World", "barrier", "current_world", "is_open", "open_world"]


def __getattr__(name: str) -> Any:
    """Import it when it is first used: the launcher needs other modules, and no NumPy."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
