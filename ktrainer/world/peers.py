"""The ranks of a world that heals: who they are, who is dead, and where the others are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from mpi4py import MPI

from ktrainer.world.stacks import Process, has_ended, where_they_are


@dataclass(frozen=True)
class Peer:
    """One rank, as the others must know it.

    Attributes:
        slot: its number for life; ranks change when others die, slots are never used again.
        local_rank: which of its host's devices it uses.
        process: its process.
    """

    slot: int
    local_rank: int
    process: Process


def where_others_are(peers: Sequence[Peer], slot: int) -> str:
    """Where all but one are, for an error message, while they cannot be asked what they do: the
    communicators are revoked, and ranks about to change.

    Args:
        peers: all, those who have died meanwhile among them.
        slot: of the one that asks.
    """
    processes = {f"process {p.slot}": p.process for p in peers if p.slot != slot}
    dead = [name for name, process in processes.items() if has_ended(process)]
    alive = [name for name in processes if name not in dead]
    said = f"Dead: {', '.join(dead)}. " if dead else ""
    left = f"Expected: {', '.join(alive)}, by their ranks at the start." if alive else ""
    return f"{said}{left}\n{where_they_are(processes, alive)}"


def known_to_have_died(comm: MPI.Intracomm) -> list[int]:
    """The ranks of `comm` that MPI knows to have died."""
    with contextlib.suppress(MPI.Exception):
        failed: MPI.Group = cast(Any, comm).Get_failed()
        return [int(rank) for rank in failed.Translate_ranks(None, comm.Get_group())]
    return []
