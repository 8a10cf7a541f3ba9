"""Where the data stand in the middle of an epoch: every rank's own, as `data/<rank>`.

tf.data pipelines have a state, and PyDatasets whose batches Python's `random` orders; the position
in arrays and other PyDatasets follows from the progress alone, and Python's iterators are read
again and passed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ktrainer.progress import Progress
from ktrainer.world import World

Arrays = dict[str, np.ndarray]
_MOST_BYTES = 2**28  # of all ranks
LEAST_BYTES = 16  # of one: it begins with a place, of two numbers


class Data(Protocol):
    """What a `ktrainer.feed.Feed` tells, and is told."""

    def state(self, inside_epoch: bool) -> bytes | None: ...

    def go_on_from(self, state: bytes) -> None: ...


def data_states(data: Data | None, progress: Progress, world: World) -> Arrays:
    """The states of all ranks, on every rank; none if one of them cannot tell its own, or if they
    are too long. All ranks call it together."""
    mine = data.state(progress.batch > 0) if data is not None else None
    sizes = world.allgather(None if mine is None else len(mine), "sizes of the data's states")
    if None in sizes:
        return {}
    if sum(sizes) > _MOST_BYTES:
        if world.is_root:
            warnings.warn(
                f"the tf.data pipelines hold {sum(sizes) / 1e6:,.0f} MB in shuffles and caches, "
                "too much for a checkpoint: a run that goes on inside an epoch reads them again. "
                "checkpoint.iterators=false leaves them out at once.",
                stacklevel=2,
            )
        return {}
    every = world.allgather(mine, "states of the data for a checkpoint")
    return {data_name(rank): np.frombuffer(s, np.uint8) for rank, s in enumerate(every)}


def restore_data(
    data: Data | None, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], world: World
) -> None:
    """Let each rank go on where it was. If the ranks had other shares of the data, the batches that
    they took are read again, and passed over. All ranks call it together."""
    if data is None or not state.get("data_replicas"):
        return
    if state["data_replicas"] == replicas_of(world):
        data.go_on_from(arrays[data_name(world.rank)].tobytes())


def replicas_of(world: World) -> list[int]:
    """Which share of the data each rank has. All ranks call it together."""
    return world.allgather(world.replica, "shares of the data")


def data_name(rank: int) -> str:
    """The name of the array that has the state of `rank`'s data."""
    return f"data/{rank}"
