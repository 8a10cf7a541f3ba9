"""Broadcast of variables from the rank, or the partition, that has their values."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ktrainer.distributed.array_transfer import broadcast_arrays, buckets
from ktrainer.distributed.world import World
from ktrainer.errors import DivergenceError
from ktrainer.runtime.garbage_collection import return_freed_memory
from ktrainer.steps.named_variables import all_variables, view_of
from ktrainer.steps.variable_placement import Placement


def broadcast_variables(named: Sequence[tuple[str, Any]], world: World, root: int = 0) -> None:
    """Set `named` variables to the values of rank `root`, bitwise, in few fused messages."""
    if world.size == 1:
        return
    arrays = [view_of(variable) for _, variable in named]
    _check_same_variables(named, arrays, world)
    sizes = [array.nbytes for array in arrays]
    del arrays  # releases the memory of values that are replaced
    for bucket in buckets(sizes):
        variables = [named[i][1] for i in bucket]
        mine = [view_of(variable) for variable in variables]
        received = broadcast_arrays(mine, world, root, "broadcast of variables")
        if world.rank != root:
            for variable, value in zip(variables, received, strict=True):
                variable.assign(value)
            del variable, value
        del mine, received
    return_freed_memory()


def equalise_partitions(model: Any, placement: Placement) -> None:
    """Give variables that several partitions hold the values of the partition that owns them."""
    held = {k: v for k, (_, v) in enumerate(all_variables(model)) if placement.holds(v)}
    # By index in the list of all: names may differ, as Keras numbers layers by process history.
    facts = {k: (placement.owns(v), view_of(v).dtype, tuple(v.shape)) for k, v in held.items()}
    every = placement.model.allgather(facts, "list the variables of each partition")
    shared = {k for theirs in every for k, (owns, _, _) in theirs.items() if not owns}
    for partition, theirs in enumerate(every):
        sent = [k for k, (owns, _, _) in theirs.items() if owns and k in shared]
        # Partitions that do not hold a variable receive it too: a broadcast is collective.
        arrays = [
            view_of(held[k]) if k in held else np.empty(theirs[k][2], theirs[k][1]) for k in sent
        ]
        what = f"broadcast of what partition {partition} shares"
        received = broadcast_arrays(arrays, placement.model, partition, what)
        for k, value in zip(sent, received, strict=True):
            if k in held and not placement.owns(held[k]):
                held[k].assign(value)


def _check_same_variables(
    named: Sequence[tuple[str, Any]], arrays: Sequence[np.ndarray], world: World
) -> None:
    """Compare shapes and dtypes between ranks first: a broadcast of different sizes would corrupt
    values or hang. Names may differ: Keras numbers layers by process history."""
    specs = [f"{array.dtype}{list(array.shape)}" for array in arrays]
    digest = zlib.crc32("\n".join(specs).encode())
    both = np.array([digest, -digest], np.int64)
    highest, lowest = world.oob_allreduce(both, "max", "comparison of variables")
    if highest == -lowest:
        return
    here = [f"{name} {spec}" for (name, _), spec in zip(named, specs, strict=True)]
    every = world.allgather(here, "comparison of variables")
    lines = []
    first, *others = world.ranks
    for rank, theirs in zip(others, every[1:], strict=True):
        for k in range(max(len(every[0]), len(theirs))):
            ours = every[0][k] if k < len(every[0]) else "(no such variable)"
            other = theirs[k] if k < len(theirs) else "(no such variable)"
            if ours.split(" ")[-1] != other.split(" ")[-1]:
                lines.append(f"variable {k}: rank {first} has {ours}, rank {rank} has {other}")
                break
    raise DivergenceError(
        "ranks hold different variables, so they cannot be broadcast: "
        + "; ".join(lines)
        + ". Build the same model, and its optimizers, on every rank."
    )
