"""`join`: ranks that have run out of data.

A rank that has joined takes part in the calls of the others with neutral values: zeros for a sum,
no rows for a gather. An average divides by the number of ranks that have not joined, so it is the
average of those, not biased towards zero.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from ktrainer.dataparallel.handlers import take_part
from ktrainer.dataparallel.state import group_of
from ktrainer.errors import DivergenceError, WorldError

if TYPE_CHECKING:
    from ktrainer.dataparallel.channel import Channel


def join() -> int:
    """Wait until all ranks have called it, and take part in their calls meanwhile.

    Reductions, gathers, broadcasts from ranks that have not joined and barriers among all ranks may
    be called meanwhile, eagerly and in compiled functions; other calls raise an error.

    Returns:
        The rank that has joined last; of several between two calls the highest one.

    Raises:
        WorldError: ranks may be lost and others come (`ktrainer run --heal`).
        DeadlineExceeded: no call came within the deadline.
    """
    group = group_of(None)
    if group.world.heals:
        raise WorldError(
            "join is not available with `ktrainer run --heal`: a rank that joins later would not "
            "know of it. Give all ranks the same number of batches."
        )
    if group.size == 1:
        return group.rank
    done: queue.Queue[int | BaseException] = queue.Queue()
    channels = (group.gradients, group.others)
    for channel in channels:
        threading.Thread(
            target=_serve, args=(channel, done), name="ktrainer-join", daemon=True
        ).start()
    taken = 0
    for _ in channels:
        result = done.get()
        if isinstance(result, BaseException):
            group.world.record_interruption(result)
            raise result
        taken += result
    every = group.others.world.allgather(taken, "join")
    return max(rank for rank, calls in enumerate(every) if calls == min(every))


def _serve(channel: Channel, done: queue.Queue[int | BaseException]) -> None:
    """Take part in calls until all ranks have joined; put their number, or an error."""
    taken = 0
    try:
        while _take_part_in_next(channel):
            taken += 1
        done.put(taken)
    except BaseException as error:
        done.put(error)


def _take_part_in_next(channel: Channel) -> bool:
    """Take part in the next call of the others; return False if all ranks have joined."""
    try:
        with channel.next_call() as (present, call):
            if call is None:
                return False
            if call.kind in ("bucket", "slices"):
                channel.sums.take_part(call)
            else:
                take_part(channel, call, present)
    except DivergenceError:
        pass  # raised on the ranks that are in different calls, too: they decide what follows
    return True
