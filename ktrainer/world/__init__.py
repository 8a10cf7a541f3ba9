"""Who else is there: rank, size, host-side collectives, and the gradient plane.

The parts of this package:

    base.py           the interface, and the world of one process
    detect.py         how this process was started, and the world that fits
    mpi.py            processes that MPI started
    mpi_comm.py       collectives on one communicator, with deadlines
    mpi_group.py      a world of some of the ranks
    horovod.py        processes that Horovod started without MPI
    horovod_sets.py   groups of ranks under Horovod
    cluster.py        processes that know one another by address: TF_CONFIG, or Slurm
    listening.py      sockets of other libraries, moved to the loopback interface

    plane.py          the gradient plane: sums of tensors from inside a compiled step
    plane_mpi.py      the same through mpi4py
    plane_horovod.py  the same through Horovod
    in_place.py       sums in the memory where arrays are
    buffers.py        memory of fused sums, handed to TensorFlow without a copy

    meeting.py        the wait for all ranks at the start
    healing.py        a world that outlives its ranks
    peers.py          who its ranks are, and which of them have died
    newcomers.py      processes that join ranks which train already
    rollcall.py       who is missing when a wait has taken too long
    stacks.py         where a silent process of this host is
    watch.py          bounds waits inside another library
    blocking.py       bounds calls of MPI that have no deadline

    arrays.py         many arrays from one rank to others
    gather.py         arrays of different ranks, brought to one
    chunks.py         messages that MPI cannot count
    mailbox.py        messages for any thread, at any time
    layout.py         which rank has which partition of which replica
"""

from __future__ import annotations

from ktrainer.world.base import ReduceOp, SingleWorld, World
from ktrainer.world.detect import barrier, current, is_open, open_world

__all__ = ["ReduceOp", "SingleWorld", "World", "barrier", "current", "is_open", "open_world"]
