"""Where the data stand in the middle of an epoch: every rank's own, as `data/<rank>`.

Only tf.data pipelines have a state: the position in arrays and PyDatasets follows from the progress
alone, and Python's iterators are read again and passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ktrainer.progress import Progress
from ktrainer.world import World

Arrays = dict[str, np.ndarray]


class Data(Protocol):
    """What a `ktrainer.feed.Feed` tells, and is told."""

    def state(self, inside_epoch: bool) -> bytes | None: ...

    def go_on_from(self, state: bytes) -> None: ...


def data_states(data: Data | None, progress: Progress, world: World) -> Arrays:
    """The states of all ranks, on every rank; none if one of them cannot tell its own. All ranks
    call it together."""
    mine = data.state(progress.batch > 0) if data is not None else None
    every = world.allgather(mine, "states of the data for a checkpoint")
    if any(state is None for state in every):
        return {}
    return {data_name(rank): np.frombuffer(s, np.uint8) for rank, s in enumerate(every)}


def restore_data(
    data: Data | None, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any], world: World
) -> None:
    """Let each rank go on where it was. If there were more or fewer ranks, the batches that they
    took are read again, and passed over."""
    if data is not None and state.get("data_ranks") == world.size:
        data.go_on_from(arrays[data_name(world.rank)].tobytes())


def data_name(rank: int) -> str:
    """The name of the array that has the state of `rank`'s data."""
    return f"data/{rank}"
