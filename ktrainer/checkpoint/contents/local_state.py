"""Arrays that are each rank's own in a checkpoint, such as those of local layers: `...@<rank>`.

They lie where the array of their name would be; `state["local"]` lists these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ktrainer.checkpoint.contents.powersgd_state import is_error
from ktrainer.distributed import World
from ktrainer.distributed.array_transfer import gather_arrays, placeholder
from ktrainer.errors import CheckpointError

Arrays = dict[str, np.ndarray]


def with_all_ranks(arrays: Arrays, local: Iterable[str], world: World) -> Arrays:
    """`arrays`, on rank 0 with the local ones of all ranks, on others without them. All ranks call
    it together.

    Args:
        arrays: of this rank.
        local: the names of those that are each rank's own.
    """
    own = [name for name in local if name in arrays]
    wanted = {
        f"{name}@{rank}": placeholder(arrays[name].shape, arrays[name].dtype)
        for name in own
        for rank in range(world.size)
    }
    received = gather_arrays(
        wanted,
        [f"{name}@{world.rank}" for name in own],
        lambda name: arrays[name.rpartition("@")[0]],
        world,
        "arrays of each rank for a checkpoint",
    )
    if not world.is_root:
        return {name: array for name, array in arrays.items() if name not in own}
    received |= {f"{name}@0": arrays[name] for name in own}
    every = {**arrays, **received}
    return {name: every[name] for name in names_of_all_ranks(arrays, own, world.size)}


def names_of_all_ranks(names: Iterable[str], local: Iterable[str], size: int) -> list[str]:
    """The names of arrays in a checkpoint of `size` ranks, in its order."""
    local = set(local)
    ranks = [f"@{rank}" for rank in range(size)]
    return [name + end for name in names for end in (ranks if name in local else [""])]


def name_of_rank(name: str, state: Mapping[str, Any], rank: int) -> str:
    """The name under which a checkpoint has an array of `rank`."""
    return f"{name}@{rank}" if name in state.get("local", ()) else name


def arrays_of_rank(arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], rank: int) -> Arrays:
    """The arrays of a checkpoint as `rank` has them, without those of other ranks."""
    local = set(state.get("local", ()))
    found = {}
    for name, array in arrays.items():
        plain, _, number = name.rpartition("@")
        if plain not in local:
            found[name] = array
        elif number == str(rank):
            found[plain] = array
    return found


def check_ranks(state: Mapping[str, Any], world: World) -> None:
    """Refuse the local layers of another number of ranks.

    Raises:
        CheckpointError: on all ranks.
    """
    saved = int(state.get("world_size", 1))
    layers = [name for name in state.get("local", ()) if not is_error(name)]
    if layers and saved != world.size:
        raise CheckpointError(
            f"the checkpoint has local layers (backend.local_layers) of {saved} ranks, and there "
            f"are {world.size}: each rank continues with its own values, so start {saved}. "
            "Or set checkpoint.resume=never"
        )
