"""Feeds of one rank without the others, and a model that records what `Model.fit` gives it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from ktrainer.config import DataConfig
from ktrainer.data import Feed, LocalBatch, ShuffleOrder, make_feed
from ktrainer.distributed import SingleWorld
from ktrainer.distributed.world import ReduceOp


class Place(SingleWorld):
    """A rank and a size, alone: in what ranks tell each other, all say what this one says."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def oob_allreduce(
        self, value: Any, op: ReduceOp = "average", what: str = "oob_allreduce"
    ) -> np.ndarray:
        table = np.asarray(value)
        by_rank = table.ndim == 2 and len(table) == self.size
        return np.repeat(table[self.rank : self.rank + 1], self.size, 0) if by_rank else table


def feed(data: Any, rank: int = 0, size: int = 1, **options: Any) -> Feed:
    """A feed as `Trainer` makes it; options of `DataConfig` go there, the others to `make_feed`."""
    fields = DataConfig.__dataclass_fields__
    config = DataConfig(**{key: options.pop(key) for key in list(options) if key in fields})
    given = {
        "training": True,
        "order": ShuffleOrder(options.pop("seed", 0)),
        "check": False,
    } | options
    return make_feed(data, world=Place(rank, size), config=config, **given)


def rows(local_batches: Iterable[LocalBatch], leaf: int = -1) -> list[list[int]]:
    """The true rows of one leaf (the targets) of each local batch, without padding."""
    found = []
    for each in local_batches:
        values = each.batch[leaf] if isinstance(each.batch, tuple) else each.batch
        assert len(values) == max(1, each.examples)
        found.append([int(v) for v in np.asarray(values)[: each.examples].reshape(-1)])
    return found


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    """One list of what the lists hold."""
    return [item for items in lists for item in items]


def numbered(count: int, width: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """`x` and `y` of `count` rows; the target is the number of the row."""
    y = np.arange(count)
    return np.repeat(y[:, None], width, axis=1).astype(np.float32), y


class Recorder(keras.Model):
    """Remembers the targets of every batch it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen: list[list[int]] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        self.seen.append(data[1].numpy().tolist())
        return super().train_step(data)
