"""One rank of the pool: takes tasks from its own socket until that closes.

Started as `mpirun ... python -m tests.dist.harness.worker SOCKET`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection

from tests.dist.harness import keras_state, leaks, wire


def main() -> None:
    """Connect, say who this is, and work."""
    # The test process asks a rank that is late for the stacks of all its threads.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from mpi4py import MPI

    endpoint = socket.socket(socket.AF_UNIX)
    endpoint.connect(sys.argv[1])
    connection = Connection(endpoint.detach())
    connection.send((MPI.COMM_WORLD.rank, os.getpid()))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_work(message))
        keras_state.reset()
        _share_data_among_all()


def _work(message: bytes) -> bytes:
    start = time.monotonic()
    try:
        fresh, call = wire.unpack_task(message)
        if fresh:
            _forget_world()
        before = leaks.take()
        result = call()
        sys.stdout.flush()
        leaked = leaks.wait_for_none(before)
        if leaked:
            _restore(before)
            raise AssertionError("left behind on this rank:\n  " + "\n  ".join(leaked))
    except (Exception, SystemExit) as error:
        return wire.pack_error(error, time.monotonic() - start, _reusable())
    return wire.pack_result(result, time.monotonic() - start, _reusable())


def _reusable() -> bool:
    """Return whether this process can take another task: all that it began in MPI has ended."""
    mpi = sys.modules.get("ktrainer.distributed.mpi_communicator")
    world = getattr(sys.modules.get("ktrainer.distributed.world_factory"), "_current", None)
    interrupted = getattr(world, "interrupted_by", None) is not None
    return not interrupted and not (mpi is not None and mpi.keeps_requests())


def _forget_world() -> None:
    """Make the next task open a `World` with communicators that carry no old messages.

    The old one is dropped, not closed: freeing a communicator waits for all ranks.
    """
    detect = sys.modules.get("ktrainer.distributed.world_factory")
    if detect is not None:
        detect._current = None  # type: ignore[attr-defined]


def _share_data_among_all() -> None:
    """Undo what the backend of the last task said of who trains on which data."""
    detect = sys.modules.get("ktrainer.distributed.world_factory")
    if detect is not None and (world := detect._current) is not None:
        world.assign_replica(world.rank, world.size)


def _restore(before: leaks.Snapshot) -> None:
    """Put variables and the working folder back, so that one leak fails one test only."""
    wanted = dict(entry.partition("=")[::2] for entry in before.environ)
    for entry in leaks.take().environ - before.environ:
        os.environ.pop(entry.partition("=")[0], None)
    os.environ.update(wanted)
    os.chdir(next(iter(before.folder)))


if __name__ == "__main__":
    main()
