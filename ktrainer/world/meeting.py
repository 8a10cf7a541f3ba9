"""The start: all ranks come to where the world is opened, or those that do not are named.

Scripts prepare data before they make a Trainer, one rank perhaps for all, so this wait has a limit
of its own. MPI's start, and its first communicator, would wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from mpi4py import MPI

from ktrainer.errors import DeadlineExceeded, PeerLost, name_ranks
from ktrainer.world.rollcall import ANSWER_SECONDS, LOOK_SECONDS, RollCall, silent

SETTING = "world.start_deadline"
_TAG = 32_000  # of messages among all processes, where the script may have its own
_WHAT = "start of all ranks"
_SPIN_SECONDS = 0.05


def meet(comm: MPI.Intracomm, seconds: float) -> None:
    """Return once all ranks have come here.

    Args:
        comm: of all ranks.
        seconds: how long to wait for them.

    Raises:
        DeadlineExceeded: naming those that have not come.
        PeerLost: one has died.
    """
    began = time.monotonic()
    roll_call = RollCall(comm, _TAG)
    answer_seconds = min(ANSWER_SECONDS, seconds / 4)
    try:
        request, look = comm.Ibarrier(), 0.0
        while not request.Test():
            waited = time.monotonic() - began
            if waited > look:
                look = waited + LOOK_SECONDS
                roll_call.answer("here")
            if waited > seconds - answer_seconds:
                answers = roll_call.ask("here", answer_seconds)
                if request.Test():  # all have come meanwhile, and some answer no more
                    return
                _end(comm, seconds, answers)
            time.sleep(1e-4 if waited < _SPIN_SECONDS else 1e-2)
    except MPI.Exception as error:
        raise PeerLost(
            f"rank {comm.rank} lost a peer at the start of all ranks: {error}"
        ) from error


def _end(comm: MPI.Intracomm, seconds: float, answers: Mapping[int, str]) -> None:
    """Raise, unless all answer: the last one has come just now."""
    missing = silent(comm.size, comm.rank, answers)
    if missing:
        not_there = (
            f"Not there: {name_ranks(missing)}, which did not come to `Trainer(...)`, or to where "
            "the world is opened otherwise: stopped, died, busy before it, or on another path."
        )
        raise DeadlineExceeded(comm.rank, 0, _WHAT, seconds, not_there, SETTING)
