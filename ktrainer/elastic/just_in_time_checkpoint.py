"""A checkpoint of a replicated pipeline, written by its surviving ranks.

    two partitions x two replicas, ranks 0 to 3; ranks 0 and 3 are lost

    rank 1: partition 1                     rank 2: partition 0
    makes the temporary folder      ──►
    arrays-p01-00001 ...                    arrays-p00-00001 ...
    what is in which file           ◄──►    or what went wrong, on all surviving ranks
    state.json, manifest.json; renames

It is like any other of the run: it names the ranks, replicas and partitions of the whole world.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ktrainer.checkpoint.background_writer import lock_folder
from ktrainer.checkpoint.contents.run_snapshot import encode_state
from ktrainer.checkpoint.format.checkpoint_folder import Described, make_temporary
from ktrainer.checkpoint.format.checkpoint_store import Store
from ktrainer.checkpoint.stage_parts import merge_stage_parts, write_stage_part
from ktrainer.distributed import World
from ktrainer.distributed.restart_records import note_save
from ktrainer.errors import CheckpointError
from ktrainer.runtime.folder_lock import seconds_after_loss
from ktrainer.steps.variable_placement import Placement


@dataclass(frozen=True)
class Grid:
    """Partition and replica of each rank, before any was lost.

    Attributes:
        places: (partition, replica) of each rank.
    """

    places: Mapping[int, tuple[int, int]]

    @property
    def partitions(self) -> int:
        """How many there are."""
        return 1 + max(partition for partition, _ in self.places.values())

    def writers(self, surviving: Iterable[int]) -> dict[int, int]:
        """The rank that writes each partition: the first of the `surviving` ones that holds it."""
        found: dict[int, int] = {}
        for rank in sorted(surviving):
            found.setdefault(self.places[rank][0], rank)
        return found

    def lost(self, surviving: Iterable[int]) -> list[int]:
        """The partitions of which no copy survives."""
        return sorted(set(range(self.partitions)).difference(self.writers(surviving)))

    def counting(self) -> list[int]:
        """The ranks that count metrics: those of the last partition."""
        last = self.partitions - 1
        return sorted(rank for rank, place in self.places.items() if place[0] == last)

    def name(self, rank: int) -> str:
        """A rank, for messages."""
        partition, replica = self.places[rank]
        return f"rank {rank} (partition {partition} of replica {replica})"


@dataclass(frozen=True)
class LastState:
    """The state to write, as far as this rank knows it; on rank 0 all but the others' arrays.

    Attributes:
        step: updates done.
        arrays: those that this rank writes.
        names: of the arrays of all ranks, in the order of the manifest.
        state: the rest, JSON-able.
        facts: more for the manifest.
        texts: more files, by name.
    """

    step: int
    arrays: Mapping[str, np.ndarray]
    names: Sequence[str]
    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    texts: Mapping[str, bytes]


def write_last_checkpoint(
    world: World, store: Store, placement: Placement, writes: bool, last: LastState
) -> Path:
    """Write a checkpoint now. All surviving ranks call this together.

    Args:
        world: the surviving ranks. Its rank 0 must be one that writes.
        placement: says which partition this rank holds.
        writes: whether this rank writes its partition.

    Returns:
        The checkpoint's folder, on all ranks.

    Raises:
        CheckpointError: on all ranks, if one could not write.
    """
    lock, folder, error = None, None, None
    try:
        if world.is_root:
            lock, error = lock_folder(store, seconds_after_loss(world.deadline))
            if error is None:
                folder, error = _begin(store.path_of(last.step))
        folder, error = world.broadcast((folder, error), 0, "start of a last checkpoint")
        if folder is not None:
            number = placement.partition
            part = write_stage_part(Path(folder), last.arrays, number) if writes else None
            parts = world.allgather((number, part), "parts of a last checkpoint")
            if world.is_root:
                error = _complete(store, Path(folder), dict(p for p in parts if p[1]), last)
            error = world.broadcast(error, 0, "end of a last checkpoint")
    finally:
        if lock is not None:
            lock.release()
    if error is not None:
        raise CheckpointError(error)
    return store.path_of(last.step)


def _begin(path: Path) -> tuple[str | None, str | None]:
    """(temporary folder, what went wrong)."""
    try:
        return str(make_temporary(path.absolute())), None
    except CheckpointError as problem:
        return None, str(problem)


def _complete(
    store: Store, folder: Path, parts: Mapping[int, dict[str, Any]], last: LastState
) -> str | None:
    """Put the parts together; returns what went wrong."""
    write = partial(_put_together, [parts[partition] for partition in sorted(parts)], last.names)
    try:
        store.save(
            last.arrays,
            encode_state(last.state),
            last.step,
            facts=last.facts,
            texts=last.texts,
            temporary=folder,
            write=write,
        )
    except CheckpointError as problem:
        return str(problem)
    note_save(store.directory, last.step, str(last.facts.get("run", "")))
    return None


def _put_together(
    parts: Sequence[dict[str, Any]], names: Sequence[str], folder: Path, arrays: Any
) -> Described:
    problems = [part["error"] for part in parts if part["error"]]
    if problems:
        raise CheckpointError("; ".join(problems))
    return merge_stage_parts(folder, parts, names)
