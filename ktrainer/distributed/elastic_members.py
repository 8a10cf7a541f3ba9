"""The members of a world that heals: identity, known failures, and a description for errors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from mpi4py import MPI

from ktrainer.distributed.stack_dump import Process, has_ended, stack_dumps

_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


@dataclass(frozen=True)
class Member:
    """One rank, as the others identify it.

    Attributes:
        stable_rank: its number, which never changes and is never reused; ranks change when others
            are lost.
        local_rank: which of its host's devices it uses.
        process: its process.
    """

    stable_rank: int
    local_rank: int
    process: Process


def describe_others(members: Sequence[Member], stable_rank: int) -> str:
    """The state of all members but one, for an error message, when no stall report can be made:
    the communicators are revoked, and ranks about to change.

    Args:
        members: all, including those lost meanwhile.
        stable_rank: of the member that asks.
    """
    processes = {
        f"process {m.stable_rank}": m.process for m in members if m.stable_rank != stable_rank
    }
    lost = [name for name, process in processes.items() if has_ended(process)]
    alive = [name for name in processes if name not in lost]
    said = f"Lost: {', '.join(lost)}. " if lost else ""
    expected = f"Expected: {', '.join(alive)}, by their ranks at the start." if alive else ""
    return f"{said}{expected}\n{stack_dumps(processes, alive)}"


def failed_ranks(comm: MPI.Intracomm) -> list[int]:
    """The ranks of `comm` that MPI knows to have failed."""
    with suppress(MPI.Exception):
        failed: MPI.Group = cast(Any, comm).Get_failed()
        return [int(rank) for rank in failed.Translate_ranks(None, comm.Get_group())]
    return []


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error says, itself or by its causes, that MPI reported a lost rank."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MPI.Exception) and error.Get_error_class() in _FAILURES:
            return True
        error = error.__cause__ or error.__context__
    return False
