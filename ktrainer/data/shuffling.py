"""The shuffle order of arrays, and of the batches of a PyDataset.

If a seed was chosen (`seed` in the configuration, or `keras.utils.set_random_seed` after the
Trainer), it is the order that `Model.fit` draws with it: TensorFlow draws from that seed at the
start of each pass, so it is the same in every epoch. Otherwise each epoch is shuffled differently,
reproducibly by the default seed, which is 0 and not a chosen one; with `seed=null` by one that is
drawn once for all ranks.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from tensorflow.python.eager import context

from ktrainer.config import Config
from ktrainer.distributed.world import World
from ktrainer.runtime.tensorflow_setup import seed_is_scripts

_SEEDS = 2**31 - 1  # TensorFlow takes seeds modulo this


class ShuffleOrder(NamedTuple):
    """The order that examples are drawn in.

    Attributes:
        seed: of the order.
        keras: whether it is the order of `Model.fit` under this seed.
        drawn: for batches that Python's `random` orders as in `Model.fit`, the newest epoch that
            was drawn, and the state that it was drawn from.
    """

    seed: int = 0
    keras: bool = False
    drawn: tuple[int, Any] | None = None

    def __str__(self) -> str:
        return f"shuffled by seed {self.seed}" + (" as in Model.fit" if self.keras else "")

    def rows(self, epoch: int, rows: int, batch: int, within_batches: bool) -> np.ndarray:
        """Indices of the rows in the order of `epoch`.

        Args:
            epoch: 0-based.
            rows: how many there are.
            batch: rows in a batch.
            within_batches: reorder the rows of each batch only.
        """
        if self.keras:
            return _keras_rows(self.seed, rows, batch, "batch" if within_batches else True)
        key = np.array([self.seed % 2**64, epoch], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key))
        if not within_batches:
            return random.permutation(rows)
        starts = range(0, rows, batch)
        return np.concatenate([s + random.permutation(min(batch, rows - s)) for s in starts])


def order_of(world: World, config: Config) -> ShuffleOrder:
    """The order of a call, the same on all ranks: that of rank 0."""
    seed = context.global_seed()
    chosen = config.seed is not None and config.is_set("seed")
    if seed is not None and (chosen or seed_is_scripts()):
        mine = ShuffleOrder(seed % _SEEDS, True)
    else:
        mine = ShuffleOrder(secrets.randbits(63) if config.seed is None else config.seed)
    return ShuffleOrder(*world.broadcast(tuple(mine), what="agree on the order of the data"))


def _keras_rows(seed: int, rows: int, batch: int, shuffle: bool | str) -> np.ndarray:
    """The indices that Keras' own adapter draws for a pass over arrays."""
    adapter = ArrayDataAdapter(np.arange(rows), batch_size=batch, shuffle=shuffle)
    with _global_seed(seed):
        batches = adapter.get_tf_dataset()
    return np.concatenate([part.numpy() for part in batches])


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Replace TensorFlow's seed in the block; `tf.random.set_seed` would restart its draws."""
    eager = context.context()
    present, eager._seed = eager._seed, seed
    try:
        yield
    finally:
        eager._seed = present
