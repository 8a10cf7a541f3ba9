"""Waits that Ctrl-C ends: what MPI may still use is kept, and the next use of the world is
refused."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ktrainer.errors import WorldError

INSIDE_SECONDS = 0.2  # a wait has then begun


def _press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def _main_thread_is_in(function: str) -> bool:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def interrupted(call: Callable[[], Any], function: str = "") -> KeyboardInterrupt:
    """The exception by which Ctrl-C ended `call`.

    Args:
        function: pressed once the main thread has been in it for a while; default: not at all, the
            call itself does it.
    """
    over = threading.Event()

    def press() -> None:
        since = time.monotonic()
        while not over.wait(0.01):
            if not _main_thread_is_in(function):
                since = time.monotonic()
            elif time.monotonic() - since > INSIDE_SECONDS:
                _press_ctrl_c()
                return

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    try:
        if function:
            thread.start()
        call()
    except KeyboardInterrupt as error:
        return error.with_traceback(None)  # whose frames would hold what MPI uses
    finally:
        over.set()
        if function:
            thread.join()
        signal.signal(signal.SIGINT, handler)
    raise AssertionError("the call was not interrupted")


def refused(use: Callable[[], Any], cause: BaseException) -> str:
    """What is said of a use that is refused because of `cause`."""
    with pytest.raises(WorldError) as refusal:
        use()
    assert refusal.value.__cause__ is cause
    return str(refusal.value)


def _waits() -> dict[str, str]:
    """What rank 0 of two is told at its next use of the world, by the wait that Ctrl-C ended."""
    from ktrainer.distributed.deadlines import call_with_deadline
    from ktrainer.distributed.mpi_world import MpiWorld

    said = {}
    for name in ("collective", "group", "communicator", "blocking call"):
        world = MpiWorld(60)
        group = world.group([0, 1], "both")
        world.deadline = 30.0
        if world.rank == 1:
            continue

        def block(world: Any = world) -> None:
            call_with_deadline(world, lambda: (_press_ctrl_c(), time.sleep(0.5)), "block")

        waits: dict[str, tuple[Callable[[], Any], str]] = {
            "collective": (lambda world=world: world.allgather("x"), "wait"),
            "group": (group.barrier, "wait"),
            "communicator": (world.duplicate, "wait"),
            "blocking call": (block, ""),
        }
        error = interrupted(*waits[name])
        assert world.interrupted_by is error
        refused(group.barrier, error)
        said[name] = refused(world.barrier, error)
    return said


def test_after_ctrl_c_in_a_wait_a_rank_can_no_longer_communicate(
    ranks: Callable[..., Any],
) -> None:
    said, _ = ranks(2, "late").run(_waits)
    assert len(said) == 4
    for text in said.values():
        assert "rank 0 can no longer communicate" in text
        assert "The wait was ended by KeyboardInterrupt" in text


def _start() -> str:
    from mpi4py import MPI

    from ktrainer.distributed.mpi_communicator import keeps_requests
    from ktrainer.distributed.mpi_world import startup_barrier

    if MPI.COMM_WORLD.rank == 1:
        return ""
    error = interrupted(lambda: startup_barrier(MPI.COMM_WORLD, 30.0), "startup_barrier")
    assert keeps_requests()
    return refused(lambda: startup_barrier(MPI.COMM_WORLD, 30.0), error)


def test_after_ctrl_c_at_the_start_a_rank_does_not_start_again(ranks: Callable[..., Any]) -> None:
    """Its second start would be taken for the first, and its first operation for the start."""
    said, _ = ranks(2, "late").run(_start)
    assert "rank 0 stopped waiting for the start of all ranks before all had come" in said
    assert "The wait was ended by KeyboardInterrupt" in said


class Receives:
    """Holds several requests that are under way, and their memory."""

    def __init__(self, world: Any) -> None:
        self.buffers = [np.zeros(1000) for _ in range(3)]
        self.requests = [world.comm.Irecv(buffer, 1) for buffer in self.buffers]


def _kept() -> dict[str, list[bool]]:
    """What is still there after a wait of rank 0 was interrupted, and all else has let go of it."""
    from mpi4py import MPI

    from ktrainer.distributed import mpi_communicator
    from ktrainer.distributed.mpi_gradients import MpiGradients
    from ktrainer.distributed.mpi_world import MpiWorld
    from ktrainer.distributed.sum_in_place import PIECE_BYTES

    a_piece = PIECE_BYTES // 8

    def kept(kind: type) -> list[Any]:
        every = [each for objects in mpi_communicator._kept for each in objects]
        return [each for each in every if isinstance(each, kind)]

    def owners() -> list[Any]:
        known, unknown = Receives(world), Receives(world)
        world.keep_if_interrupted(known)
        interrupted(world.barrier, "wait")
        return [weakref.ref(known), weakref.ref(unknown)]

    def sums() -> list[Any]:
        arrays, before = [np.ones(a_piece) for _ in range(2)], len(kept(MPI.Request))
        interrupted(lambda: gradients.reduce_in_place(arrays, 1.0), "wait")
        found["requests"] = [len(kept(MPI.Request)) - before == 2]
        return [weakref.ref(array) for array in arrays]

    found: dict[str, list[bool]] = {}
    for part in (owners, sums):
        world = MpiWorld(60)
        gradients = MpiGradients(world)
        gradients._communicators.shared = None  # messages, as between hosts
        world.deadline = 30.0
        if world.rank == 0:
            references = part()
            gc.collect()
            found[part.__name__] = [reference() is not None for reference in references]
    world = MpiWorld(60)
    if world.rank == 0:
        interrupted(world.duplicate, "wait")
        found["new communicator"] = [bool(kept(MPI.Intracomm))]
    return found


@pytest.mark.exhaustive
def test_what_mpi_may_still_use_is_kept_after_ctrl_c(ranks: Callable[..., Any]) -> None:
    found, _ = ranks(2, "late").run(_kept)
    assert found == {
        "owners": [True, False],  # the second one has not asked for it
        "requests": [True],  # one to receive, one to send
        "sums": [True, False],  # the piece that was waited for; the next one was not started
        "new communicator": [True],
    }
