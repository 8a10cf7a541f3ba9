"""Position in the data: one state per rank, as `data/<rank>`.

tf.data pipelines have a state in mid-epoch. PyDatasets whose batches Python's `random` orders have
one of 2.5 kB that is the same on all ranks, kept once, as `data/0`; loaders of torch one of 5 kB
for each generator, and 5 kB more inside an epoch; both also between two epochs. The position in
arrays, random-access data and other PyDatasets follows from the progress alone, and of Python's
iterators the batches that were seen are read again and skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ktrainer.distributed import World
from ktrainer.state.progress import Progress

Arrays = dict[str, np.ndarray]
_MOST_BYTES = 2**28  # of all ranks
LEAST_BYTES = 16  # of one: it begins with a position, of two numbers


class Data(Protocol):
    """The part of `ktrainer.data.Feed` that is saved and restored."""

    @property
    def state_is_common(self) -> bool: ...

    def state(self, inside_epoch: bool) -> bytes | None: ...

    def resume_from(self, state: bytes) -> None: ...


def data_states(data: Data | None, progress: Progress, world: World) -> Arrays:
    """The states of all ranks, or a common one, on every rank; none if one of them has none, or if
    they are too large. All ranks call it together."""
    mine = data.state(progress.batch > 0) if data is not None else None
    sizes = world.allgather(None if mine is None else len(mine), "sizes of the data's states")
    if None in sizes:
        return {}
    if sum(sizes) > _MOST_BYTES:
        if world.is_root:
            warnings.warn(
                f"the tf.data pipelines hold {sum(sizes) / 1e6:,.0f} MB in shuffle buffers and "
                "caches, too much for a checkpoint: a run that resumes inside an epoch reads the "
                "data again. Set checkpoint.iterators=false to skip the attempt.",
                stacklevel=2,
            )
        return {}
    if data is not None and data.state_is_common and mine is not None:
        return {data_name(0): np.frombuffer(mine, np.uint8)}
    every = world.allgather(mine, "states of the data for a checkpoint")
    return {data_name(rank): np.frombuffer(s, np.uint8) for rank, s in enumerate(every)}


def restore_data(
    data: Data | None, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], world: World
) -> None:
    """Restore each rank's position in the data. If the data was split otherwise, and ranks had
    states of their own, the batches that were seen are read again and skipped. All ranks call it
    together."""
    if data is None or not state.get("data_replicas"):
        return
    if data.state_is_common:
        data.resume_from(arrays[data_name(0)].tobytes())
    elif state["data_replicas"] == replicas_of(world):
        data.resume_from(arrays[data_name(world.rank)].tobytes())


def replicas_of(world: World) -> list[int]:
    """The share of the data of each rank. All ranks call it together."""
    return world.allgather(world.replica, "shares of the data")


def data_name(rank: int) -> str:
    """The name of the array with the state of `rank`'s data."""
    return f"data/{rank}"
