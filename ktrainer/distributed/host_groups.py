"""Hierarchical all-reduce, for ranks on several hosts of which some have several ranks.

The ranks of a host add up their arrays through shared memory, or by messages where they have none;
the first of them, the leader, adds the sums of all hosts with the other leaders; the ranks of the
host get the result from it:

    host a   rank 0 <- rank 1      rank 0 <-> rank 2      rank 0 -> rank 1
    host b   rank 2 <- rank 3      (16 bits if asked)     rank 2 -> rank 3

Each host sends and receives 2 * (hosts - 1) / hosts times the array, however many ranks it has.
"""

from __future__ import annotations

import platform
from typing import cast

import numpy as np
from mpi4py import MPI

from ktrainer.distributed.mpi_communicator import MpiComm
from ktrainer.distributed.shared_memory import SharedMemory, open_shared_memory
from ktrainer.distributed.sixteen_bits import convert
from ktrainer.distributed.sum_in_place import sum_in_place


class HostGroups:
    """The ranks of this host, and the leaders of all hosts.

    Args:
        world: waits, with its deadline.
        local: the ranks of this host.
        leaders: the first rank of each host; `COMM_NULL` on the other ranks.
        shared: memory of the ranks of this host, if they have it; else they exchange messages.
    """

    def __init__(
        self,
        world: MpiComm,
        local: MPI.Intracomm,
        leaders: MPI.Intracomm | MPI.Comm,
        shared: SharedMemory | None,
    ) -> None:
        self._world, self._local, self._shared = world, local, shared
        self._leaders = cast(MPI.Intracomm, leaders)

    def sum(self, array: np.ndarray, total: np.ndarray, what: str = "gradients") -> None:
        """Sum `array` over all ranks into `total`.

        Args:
            array: one-dimensional; its contents are lost.
            total: as long; of the type in which sums go between hosts. 16-bit floats are added up
                in float32. May be `array`.
            what: what is summed, for messages.
        """
        local, wait = self._local, self._world.wait
        within = f"{what} within a host"
        if self._shared is not None:
            self._shared.sum_in_place(array, within)
        else:
            sum_in_place(self._world, local, array, within)
        if local.rank == 0:
            convert(array, total)
            sum_in_place(self._world, self._leaders, total, f"{what} between hosts")
        if local.size > 1:
            wait(local.Ibcast(_sendable(total), 0), f"broadcast of {what} within a host", total)

    def close(self) -> None:
        """Free the communicators, and the memory. All ranks call it together."""
        self._shared = None
        self._world.free(self._local)
        self._world.free(self._leaders)


def open_host_groups(world: MpiComm) -> HostGroups | None:
    """Groups of the ranks of `world` by host; None if all are on one host, or each on another, and
    nothing is to be gained. All ranks call it together.

    Raises:
        DeadlineExceeded: a rank does not open them in time.
    """
    if world.size < 3:
        return None
    hosts = world.allgather(host_name(), "host of each rank")
    leader_of = [hosts.index(host) for host in hosts]
    if len(set(leader_of)) in (1, world.size):
        return None
    leader, rank = leader_of[world.rank], world.rank

    def split() -> tuple[MPI.Intracomm, MPI.Intracomm]:
        among_leaders = 0 if rank == leader else MPI.UNDEFINED
        comms = world.comm.Split(leader, rank), world.comm.Split(among_leaders, rank)
        return cast(tuple[MPI.Intracomm, MPI.Intracomm], comms)

    local, leaders = world.call(split, "open groups of hosts")
    for comm in (local, leaders):
        if comm != MPI.COMM_NULL:
            world.watch(comm)
    here = [each for each in range(world.size) if leader_of[each] == leader]
    return HostGroups(world, local, leaders, open_shared_memory(world, local, here))


def host_name() -> str:
    """The name by which ranks of one host are known to be so."""
    return platform.node()


def _sendable(array: np.ndarray) -> np.ndarray:
    """The same memory, of a type that MPI knows: it has none for 16-bit floats."""
    return array.view(np.uint16) if array.itemsize == 2 else array
